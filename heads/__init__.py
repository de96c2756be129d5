"""What is trained and shipped: targets, heads and their checkpoints."""

from heads.checkpoint import load_head
from heads.medusa import MedusaHead

__all__ = ["MedusaHead", "load_head"]
