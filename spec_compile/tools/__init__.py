"""Tools for users of a model: `audit.audit`, and the searches of `tune` and `tune-kernels`."""
