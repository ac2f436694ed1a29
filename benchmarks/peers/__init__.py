"""Other task systems, each with the setting that is fastest for it at the same promise."""
