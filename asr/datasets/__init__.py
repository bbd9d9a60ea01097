"""Corpora, manifests, datasets and augmentation for training, on lhotse."""
