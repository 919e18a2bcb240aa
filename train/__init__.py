"""Stage 3: sampling engines, episodes, GRPO over many adapters, evaluation. ``python -m train --help``."""
