"""What the host has to do for an operator before its kernels are launched, in dispatches of an elementwise one.

Measured on an H200's host, call by call and with no profiler near: `benchmarks/gpu/operator_costs.py`.
A matrix product asks cuBLAS for an algorithm, a convolution cuDNN, a node of the backward pass
gathers what it saved; each launch comes on top. Modelled host time goes by this, and measured host
time is never less.
"""

from __future__ import annotations

FORWARD = {
    "aten::_to_copy": 1.4,
    "aten::addmm": 3.6,
    "aten::mm": 2.5,
    "aten::bmm": 3.1,
    "aten::linear": 3.6,
    "aten::baddbmm": 3.6,
    "aten::native_layer_norm": 2.2,
    "aten::native_group_norm": 2.5,
    "aten::native_batch_norm": 4.6,
    "aten::convolution": 3.8,
    "aten::native_dropout": 2.0,
    "aten::sum": 1.2,
    "aten::mean": 1.2,
    "aten::max": 1.7,
    "aten::min": 1.7,
    "aten::cat": 1.2,
    "aten::index": 1.3,
    "aten::index_select": 1.7,
    "aten::gather": 1.5,
    "aten::embedding": 1.7,
    "aten::_index_put_impl_": 1.7,
    "aten::nonzero": 1.2,
    "aten::_unique2": 2.5,
    "aten::linalg_vector_norm": 1.6,
    "aten::nll_loss_forward": 1.4,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4.2,
    "aten::scaled_dot_product_attention": 4.2,
    "aten::sort": 4.2,
    "aten::topk": 2.1,
    "aten::lstm": 6.7,
    "aten::gru": 6.7,
}
"""From the program's own thread."""
BACKWARD = {
    "aten::_to_copy": 3.0,
    "aten::mm": 3.2,
    "aten::bmm": 3.2,
    "aten::add_": 1.7,
    "aten::fill_": 1.7,
    "aten::zero_": 1.7,
    "aten::sum": 2.8,
    "aten::native_layer_norm_backward": 7.9,
    "aten::native_group_norm_backward": 7.9,
    "aten::native_batch_norm_backward": 9.2,
    "aten::convolution_backward": 10.0,
    "aten::embedding_dense_backward": 3.3,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 7.5,
    "aten::scaled_dot_product_attention_backward": 7.5,
    "aten::lstm_backward": 33.3,
    "aten::gru_backward": 33.3,
}
"""From the autograd engine: an operator and its node."""
USUAL_FORWARD, USUAL_BACKWARD = 1.0, 2.5
LISTED = 0.17
"""For each tensor in the lists of a `_foreach_` or `_fused_` operator, with the optimizer's own Python."""
MODULE = 0.5
"""For each call of a module."""
PASS = 6.5
"""For each backward pass: another thread takes it over, and gives it back."""
BACKWARD_PASS = "backward"
"""The annotation within which the engine is at work."""
