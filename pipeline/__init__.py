"""Stages 1 and 2: files and statistics. Never imports torch, train or moe_gate; imports in well under a second."""
