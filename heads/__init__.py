"""What is trained and shipped: targets, heads and their checkpoints."""

from heads.checkpoint import load_head
from heads.eagle import Eagle1Head
from heads.eagle3 import Eagle3Head
from heads.medusa import MedusaHead

__all__ = ["Eagle1Head", "Eagle3Head", "MedusaHead", "load_head"]
