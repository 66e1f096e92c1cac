"""The life of a job: check, own, recover, plan, run, finish; and what other processes ask of it."""
