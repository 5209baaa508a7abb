"""dstune: which DeepSpeed settings fit, found by running the real training step on a virtual GPU."""

__version__ = "0.1.0"

__all__ = ["__version__"]
