"""Readers of other people's result files. Each yields trajectories one at a time and trusts nothing."""
