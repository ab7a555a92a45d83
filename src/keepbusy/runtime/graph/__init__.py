"""`graph`: a training step captured once as a CUDA graph, and replayed."""

from keepbusy.runtime.graph.graphed_step import graph as graph
