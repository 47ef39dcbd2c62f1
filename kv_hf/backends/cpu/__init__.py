"""The compiled CPU kernel: C behind ctypes. The only place that knows of a C library."""
