"""Audio files, resampling, filterbanks and normalization: what inference needs of data."""
