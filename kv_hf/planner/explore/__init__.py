"""The planner as one HTML file, for people who drag sliders (`kv-hf explore`)."""
