"""Environments of other packages, on our contract. Each module imports its package, and is imported only when named."""
