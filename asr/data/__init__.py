"""Corpora as lhotse manifests, features, augmentation and Lightning data modules."""
