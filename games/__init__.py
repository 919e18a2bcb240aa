"""Shipped environments, one file each. They import nothing of the project but the environment contract."""
