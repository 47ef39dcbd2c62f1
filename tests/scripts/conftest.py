import quanto_in_python  # noqa: F401
