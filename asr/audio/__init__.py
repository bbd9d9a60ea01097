"""Audio files, resampling, filterbanks and normalization: the input of recognition."""
