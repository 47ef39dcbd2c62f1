"""The Triton kernels: decode over pages, sealing, appending. Only `support` may be imported without Triton."""
