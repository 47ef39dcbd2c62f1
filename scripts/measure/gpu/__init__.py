"""Everything about one GPU in one command and a few minutes: what is run (plan), how (measure), by whom (worker, crew, run)."""
