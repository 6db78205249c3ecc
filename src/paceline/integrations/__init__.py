"""Paceline inside other libraries, one module each; imported by whoever has the library.

``lightning`` has Strategies for Lightning Fabric, ``lightning_trainer`` one for its Trainer,
``accelerate`` an Accelerator for elastic jobs.
"""

__all__ = ["accelerate", "lightning", "lightning_trainer"]
