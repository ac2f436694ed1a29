-- What a run saved for the next run of its task, as JSON.

ALTER TABLE task ADD COLUMN checkpoint TEXT;
