-- Why a running task was asked to cancel. Until here only its note said so, which the run itself may write over.

ALTER TABLE task ADD COLUMN cancel_reason TEXT;
