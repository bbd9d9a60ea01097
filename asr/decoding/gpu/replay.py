"""Runs the kernels of a frame again and again: as a CUDA graph, one launch a frame, or one by one."""

from __future__ import annotations

import threading
import warnings

import torch

from asr.decoding.gpu.frame_room import FrameRoom

# While a thread captures, no other may begin to.
_capturing = threading.Lock()


class FrameReplay:
    """Reads frames in a room.

    Args:
        room: must stay where it is; without paths in it.
        captures: whether to make a graph of a frame; on a GPU only. Where that fails, a warning says so, and the
            kernels are launched one by one, with the same outcome.
    """

    def __init__(self, room: FrameRoom, captures: bool) -> None:
        self._room = room
        self._graph: torch.cuda.CUDAGraph | None = None
        if captures and room.counts.is_cuda:
            try:
                self._graph = self._captured()
            except RuntimeError as error:
                warnings.warn(
                    f"no CUDA graph could be made of a frame, kernels are launched one by one: {error}", stacklevel=2
                )

    def read(self, num_frames: int) -> None:
        """Reads so many frames of the room, without waiting for them."""
        for _ in range(num_frames):
            if self._graph is None:
                self._room.read()
            else:
                self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        device = self._room.counts.device
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        with _capturing:
            # Kernels are compiled and loaded at their first launch, which must not fall into the capture.
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._room.read()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._room.read()
        self._room.counts.zero_()
        return graph
