"""Several processes, one GPU each, that compute together."""
