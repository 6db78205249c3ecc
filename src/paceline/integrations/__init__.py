"""Paceline inside other libraries, one module each; imported by whoever has the library.

``lightning`` has a Strategy for Lightning Fabric, ``lightning_trainer`` one for its Trainer.
"""

__all__ = ["lightning", "lightning_trainer"]
