"""The measurements of this repository: what its own results need, and the wheel does not carry."""
