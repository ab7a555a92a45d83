"""How many operators PyTorch dispatches on the host before one of them launches a kernel.

Counted in PyTorch profiler traces of eight programs (medians): a linear layer transposes and views
first, a cast allocates, a backward node gathers what it saved. Each costs the host about the same,
so this is what modelled host time goes by. Where it is measured, nobody looks here.
"""

from __future__ import annotations

FORWARD = {
    "aten::_to_copy": 4,
    "aten::addmm": 6,
    "aten::mm": 6,
    "aten::bmm": 6,
    "aten::linear": 6,
    "aten::add": 2,
    "aten::sub": 2,
    "aten::gelu": 2,
    "aten::native_layer_norm": 6,
    "aten::native_group_norm": 6,
    "aten::native_batch_norm": 6,
    "aten::convolution": 4,
    "aten::clamp_min": 2,
    "aten::relu": 2,
    "aten::sum": 2,
    "aten::mean": 2,
    "aten::cat": 4,
    "aten::fill_": 4,
    "aten::random_": 3,
    "aten::normal_": 3,
    "aten::index": 11,
    "aten::index_select": 12,
    "aten::embedding": 4,
    "aten::_index_put_impl_": 11,
    "aten::nonzero": 2,
    "aten::linalg_vector_norm": 2,
    "aten::item": 2,
    "aten::_log_softmax": 7,
    "aten::_softmax": 7,
    "aten::nll_loss_forward": 5,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 20,
    "aten::scaled_dot_product_attention": 20,
}
"""From the program's own thread; one where nothing is listed."""
BACKWARD = {
    "aten::_to_copy": 11,
    "aten::copy_": 8,
    "aten::mm": 7,
    "aten::bmm": 7,
    "aten::add_": 3,
    "aten::mul": 2,
    "aten::native_layer_norm_backward": 10,
    "aten::native_batch_norm_backward": 8,
    "aten::convolution_backward": 14,
    "aten::gelu_backward": 7,
    "aten::threshold_backward": 7,
    "aten::fill_": 7,
    "aten::embedding_dense_backward": 10,
    "aten::index": 11,
    "aten::_index_put_impl_": 11,
    "aten::nonzero": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 22,
    "aten::scaled_dot_product_attention_backward": 22,
}
"""From the autograd engine; four where nothing is listed."""
USUAL_FORWARD, USUAL_BACKWARD = 1, 4
BACKWARD_PASS = "backward"
"""The annotation within which the engine is at work."""
