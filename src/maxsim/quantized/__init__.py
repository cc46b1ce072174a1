"""Quantised documents: codes in the layout of the tokens they stand for, and what decodes them. Knows nothing of
scoring."""

from .codes import Codes
from .container import Quantized

__all__ = ["Codes", "Quantized"]
