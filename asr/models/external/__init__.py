"""CTC networks of other toolkits behind one interface: waveforms in, log-probabilities, lengths and tokens out."""

from asr.models.external.base import CallableModel, ExternalModel, StreamingModel, load_acoustic_model

__all__ = ["CallableModel", "ExternalModel", "StreamingModel", "load_acoustic_model"]
