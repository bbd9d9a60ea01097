"""Transducers of other toolkits behind one interface: encoder, prediction network, joint network, and tokens."""

from asr.models.transducers.base import State, Transducer, load_transducer

__all__ = ["State", "Transducer", "load_transducer"]
