-- Whether somebody has asked the node to take no new tasks.

ALTER TABLE node ADD COLUMN draining INTEGER NOT NULL DEFAULT 0;
