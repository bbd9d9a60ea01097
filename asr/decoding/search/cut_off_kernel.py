"""Where the scores of one stream are cut off, as loops for `compiled_loop`; the tensor form is `cut_off` beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

_NUM_BUCKETS = 2048


def kth_best(value: Any, k: int) -> Any:
    """The k-th largest of finite numbers, k from 1 to their number: buckets inside the bucket that holds it."""
    while True:
        low, high = value[0], value[0]
        for i in range(len(value)):
            low, high = min(low, value[i]), max(high, value[i])
        if low == high:
            return low
        per_bucket = (_NUM_BUCKETS - 1) / (np.float64(high) - np.float64(low))
        histogram = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        for i in range(len(value)):
            histogram[int((np.float64(high) - np.float64(value[i])) * per_bucket)] += 1
        bucket = 0
        while histogram[bucket] < k:
            k -= histogram[bucket]
            bucket += 1
        inside = np.empty(histogram[bucket], dtype=value.dtype)
        num_inside = 0
        for i in range(len(value)):
            if int((np.float64(high) - np.float64(value[i])) * per_bucket) == bucket:
                inside[num_inside] = value[i]
                num_inside += 1
        value = inside


def cut_off(value: Any, beam: Any, min_active: int, max_active: int) -> Any:
    """The worst score that survives, of finite scores of one stream; max_active 0 is no limit."""
    threshold = -beam
    num_inside = 0
    for i in range(len(value)):
        if value[i] >= threshold:
            num_inside += 1
    if num_inside < min_active and num_inside < len(value):
        threshold = kth_best(value, min_active) if len(value) >= min_active else kth_best(value, len(value))
        threshold = min(threshold, -beam)
        num_inside = min_active
    if max_active and num_inside > max_active:
        threshold = max(threshold, kth_best(value, max_active))
    return threshold
