"""What an operator launches on CUDA, and how long each kernel runs: which operator follows which law.

The laws stand in laws.py (bytes and elements) and products.py (arithmetic): they go by what an operator is, and by how
PyTorch's CUDA code launches it, which is not how its CPU code does. An operator that is not listed is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from keepbusy.virtual.costs import laws, products
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.operator_call import Call, Kernel, NoLaw, Operand

_Key: TypeAlias = tuple[str, tuple[Operand, ...], tuple[Operand, ...], tuple[Any, ...], bool]


class Law(NamedTuple):
    """How the operators of a family are costed."""

    kernels: Callable[[Call], list[Kernel]]
    names: str
    needs: tuple[int, ...] = (0,)  # how many dimensions the first inputs have at least; without them it does not apply
    asks: tuple[str, ...] = ()  # the arguments that it depends on, beside the tensors

    @property
    def depends_on_precision(self) -> bool:
        """Whether PyTorch's precision of float32 products is for these operators."""
        return self.kernels is products.matrix_product


_TABLE = (
    # what computes
    Law(
        products.matrix_product,
        "mm addmm addmm_ bmm baddbmm baddbmm_ addbmm matmul linear mv addmv dot vdot _scaled_mm _int_mm "
        "_addmm_activation addr outer linalg_vecdot",
        (),
    ),
    Law(
        products.attend,
        "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        (2, 2),
        ("is_causal",),
    ),
    Law(
        products.attend_backward,
        "scaled_dot_product_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward",
        (2,),
        ("is_causal",),
    ),
    Law(products.attend_whole, "_native_multi_head_attention", (3,), ("num_head",)),
    Law(
        products.convolve,
        "convolution _convolution cudnn_convolution convolution_overrideable conv1d conv2d conv3d "
        "cudnn_convolution_transpose _slow_conv2d_forward slow_conv3d_forward _conv_depthwise2d mkldnn_convolution",
        (2, 2),
        ("stride", "transposed", "groups"),
    ),
    Law(
        products.convolve_backward,
        "convolution_backward convolution_backward_overrideable _slow_conv2d_backward",
        (1, 2, 2),
        ("stride", "transposed", "groups"),
    ),
    Law(
        products.recur,
        "lstm gru rnn_tanh rnn_relu _cudnn_rnn lstm_backward gru_backward rnn_tanh_backward rnn_relu_backward "
        "_cudnn_rnn_backward",
        (2,),
        ("batch_sizes",),
    ),
    # what moves bytes
    Law(
        laws.nothing,
        "empty empty_strided empty_like new_empty resize_ set_ view as_strided _reshape_alias reshape t transpose "
        "permute expand select slice narrow unsqueeze squeeze detach alias unbind split chunk unfold diagonal "
        "view_as_real view_as_complex _unsafe_view record_stream is_set_to real imag movedim swapaxes split_with_sizes",
        (),
    ),
    Law(laws.copy, "copy_ _to_copy clone to contiguous", ()),
    Law(laws.fill, "fill_ zero_ zeros ones full zeros_like ones_like full_like arange linspace eye tril_indices", ()),
    Law(
        laws.draw,
        "normal_ normal uniform_ rand randn rand_like randn_like random_ randint randint_like bernoulli_ bernoulli "
        "exponential_ geometric_ cauchy_ log_normal_ randperm multinomial",
        (),
    ),
    Law(laws.dropout, "native_dropout _fused_dropout dropout native_dropout_backward"),
    Law(laws.concatenate, "cat stack", ()),
    Law(laws.move, "flip roll repeat tril tril_ triu triu_ where col2im im2col", ()),
    # what gathers many elements into few
    Law(
        laws.reduce,
        "sum mean amax amin max min argmax argmin prod any all norm linalg_vector_norm var std var_mean std_mean "
        "logsumexp nansum aminmax median count_nonzero",
        asks=("dim",),
    ),
    Law(laws.softmax, "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data softmax log_softmax"),
    Law(laws.nll_loss, "nll_loss_forward nll_loss2d_forward"),
    Law(laws.nll_loss_backward, "nll_loss_backward nll_loss2d_backward"),
    Law(laws.sort, "sort argsort kthvalue"),
    Law(laws.topk, "topk"),
    Law(laws.unique, "_unique2 unique_dim unique_consecutive"),
    Law(laws.scan, "cumsum cumsum_ cumprod cummax logcumsumexp"),
    # normalisations
    Law(laws.layer_norm, "native_layer_norm layer_norm rms_norm _fused_rms_norm"),
    Law(
        laws.layer_norm_backward, "native_layer_norm_backward _fused_rms_norm_backward rms_norm_backward", needs=(0, 0)
    ),
    Law(laws.group_norm, "native_group_norm native_group_norm_backward"),
    Law(
        laws.batch_norm,
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm "
        "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward",
    ),
    # what is found by number
    Law(laws.gather, "embedding index_select gather take take_along_dim embedding_renorm_", ()),
    Law(laws.embedding_backward, "embedding_dense_backward"),
    Law(
        laws.scatter,
        "index_copy_ index_copy scatter scatter_ scatter_add scatter_add_ scatter_reduce masked_scatter_ "
        "masked_scatter index_fill_",
    ),
    Law(laws.index_add, "index_add_ index_add"),
    Law(laws.index_put, "index_put index_put_ _index_put_impl_", asks=("accumulate",)),
    Law(laws.index, "index _unsafe_index", ()),
    Law(laws.masked_select, "masked_select", ()),
    Law(laws.bincount, "bincount"),
    Law(laws.one_hot, "one_hot", ()),
    Law(laws.nonzero, "nonzero"),
    # images
    Law(laws.average, "avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward", asks=("kernel_size",)),
    Law(laws.maxima_backward, "max_pool2d_with_indices_backward", ()),
    Law(laws.nearest, "upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d", ()),
    Law(laws.bilinear, "upsample_bilinear2d grid_sampler_2d", ()),
    Law(laws.bilinear_backward, "upsample_bilinear2d_backward", ()),
)
LAWS: Mapping[str, Law] = {name: law for law in _TABLE for name in law.names.split()}
_LISTS = Law(laws.multi_tensor, "", (), ("lists",))
"""Of all `_foreach_…` and `_fused_…` operators that are not listed. `lists`: how many lists of tensors were flattened
into the inputs."""
_ELEMENTWISE = Law(laws.elementwise, "", ())


def law_of(name: str) -> Law:
    """Of an operator, given without its namespace and overload."""
    return LAWS.get(name) or (_LISTS if name.startswith(("_foreach_", "_fused_")) else _ELEMENTWISE)


class OperatorCosts:
    """Of one device. They are kept by name and tensors, so a training loop pays for them once."""

    def __init__(
        self, device: Device, allows_tf32: Callable[[], bool] = lambda: False, notes: list[str] | None = None
    ) -> None:
        """`allows_tf32`: whether float32 products may use tensor cores now. `notes`: where to note a law that fails,
        so that the program goes on; without it, as in tests, the failure is raised.
        """
        self.device, self.notes = device, notes
        self.allows_tf32 = allows_tf32
        self.by_call: dict[Any, tuple[Callable[..., Any], Sequence[Kernel]]] = {}
        """What the host calls and the device runs, by what the caller knows a call by, which is quicker to make."""
        self._known: dict[_Key, tuple[Kernel, ...]] = {}

    def kernels(
        self,
        name: str,
        inputs: tuple[Operand, ...],
        outputs: tuple[Operand, ...] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[Kernel, ...]:
        """Name and work of each kernel. `name` without its namespace and overload; tensors in the schema's order."""
        law = law_of(name)
        given = tuple((one, _plain(arguments[one])) for one in law.asks if one in arguments) if arguments else ()
        tf32 = law.depends_on_precision and self.allows_tf32()
        key = (name, inputs, outputs, given, tf32)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = tuple(
                self._found(law, Call(self.device, name, inputs, outputs, dict(given), tf32))
            )
        return found

    def _found(self, law: Law, call: Call) -> list[Kernel]:
        if not (call.inputs or call.outputs):
            return []
        if len(call.inputs) < len(law.needs) or any(
            len(one[0]) < n for one, n in zip(call.inputs, law.needs, strict=False)
        ):
            law = _ELEMENTWISE
        try:
            return law.kernels(call)
        except NoLaw:
            return laws.elementwise(call)
        except Exception as error:
            if self.notes is None:
                raise
            shapes = ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in call.inputs)
            self.notes.append(
                f"The time of {call.name}({shapes}) on the virtual GPU is that of its bytes alone: "
                f"its law failed with {type(error).__name__} ({error}), which is a bug of keepbusy's."
            )
            return laws.elementwise(call)


def _plain(value: Any) -> Any:
    """As part of a key: of a tensor its length."""
    if hasattr(value, "shape"):
        return value.shape[0]
    return tuple(value) if isinstance(value, list) else value
