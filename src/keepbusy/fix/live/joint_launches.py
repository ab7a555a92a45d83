"""Many launches made as one: loops over tensors by PyTorch's `_foreach_` functions, and optimizers that step fused.

    for p, q in zip(model.parameters(), average.parameters()):
        q.mul_(0.999).add_(p, alpha=0.001)

The loop's body is run once, with all of `p` and all of `q` in place of one each (`loop_turns`). It tells what it would
do to them, and meets whatever is not plain arithmetic on plain tensors before any of it is done: then the loop runs as
it is written. Else each operator is launched once for all. The loop's own code makes the last turn, which leaves its
names as they would be.

The order of the turns is of no account where no tensor of a turn shares memory with one of another: that is looked at
each time. That a joint launch rounds as single ones do is seen the first times: it is made of copies, and compared bit
for bit with what the loop makes.

A fused optimizer rounds differently in the last bit, so it is asked for. Its first steps are made both ways from one
state: as the program would have stepped, on copies of its weights and of the optimizer's state, and fused. Where they
differ by more than rounding the copies' values count from then on.
"""

from __future__ import annotations

import copy
import inspect
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import getattr_static
from operator import attrgetter
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keepbusy.fix.live.host_waits import is_watched
from keepbusy.fix.live.switch import CHECKED, FixSwitch, Place, ours, place_of
from keepbusy.fix.syntax.loop_turns import METHODS
from keepbusy.instrument.lines import shown
from keepbusy.instrument.patches import Function, Patches

_AT_ONCE = 1 << 26
"""Bytes of what is made in between: a loop holds that of one turn only."""
_VAIN = 8
"""Times that a loop could not be joined: then it is not looked at any more."""
_TENSORS = {Tensor, nn.Parameter}
_DTYPE, _REQUIRES_GRAD, _BYTES = map(attrgetter, ("dtype", "requires_grad", "nbytes"))
_KIND = attrgetter("dtype", "device", "requires_grad")
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_NAMED = {dict, OrderedDict, defaultdict}
_HELD = {
    *(list, tuple, *_NAMED, type({}.keys()), type({}.values()), type({}.items())),
    *(type(OrderedDict[str, str]().keys()), type(OrderedDict[str, str]().values())),
    type(OrderedDict[str, str]().items()),
}
_LOOKUPS = {vars(nn.Module)[name].__code__ for name in ("parameters", "named_parameters", "buffers", "named_buffers")}
_LOOKS_UP = ("named_parameters", "named_buffers", "_named_members", "named_modules")
"""Generators that only look up what a module has, and what these use."""
_FORMS = {
    **dict.fromkeys(("zero", "neg", "sqrt"), ("",)),
    **dict.fromkeys(("add", "sub"), ("c", "n")),
    **dict.fromkeys(("addcmul", "addcdiv"), ("cc",)),
    **dict.fromkeys(("clamp_min", "clamp_max"), ("n",)),
    "copy": ("c",),
    "div": ("c",),
    "mul": ("c", "n", "t"),
    "lerp": ("cn",),
}
"""Of each operator what may stand beside the tensor: many others, a number, or one number on the device."""
_OPTIONS = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
_KINDS = ("Adam", "AdamW", "SGD", "Adagrad")
_CHOICES = ("fused", "foreach", "differentiable")
_ROUNDING, _SMALLEST = 1e-5, 1e-7
"""Of a weight; and of those that are nearly nothing."""


class AsWritten(Exception):  # noqa: N818 -- no error
    """The loop is to be run as it is written."""


class Uneven(AsWritten):
    """What the turn is to do depends on which one it is: turns of one kind are looked at by themselves."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self.kinds = kinds


class JointLaunch(NamedTuple):
    """One function for all turns."""

    function: Callable[..., Any]
    columns: tuple[Column, ...]
    rest: tuple[Any, ...]
    options: dict[str, Any]
    made: Column | None


class Single:
    """One number on the device, of which nothing is asked but to be multiplied by."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __bool__(self) -> bool:
        raise AsWritten


def _method(name: str) -> Callable[..., Any]:
    return lambda column, *given: column._do(name, given, {})


class Column:
    """What one expression is in each of the turns."""

    def __init__(self, turns: JointTurns, held: Sequence[Any], like: Column | None = None) -> None:
        """`like`: of those that are yet to be made, what they will be like."""
        self.turns, self._held, self._like = turns, held, like
        self._are_tensors = False
        self._kind: tuple[Any, ...] = ()
        self._shapes: Sequence[Any] = ()
        self._attributes: dict[str, Column | None] = {}

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise AsWritten

    def __eq__(self, other: object) -> bool:
        raise AsWritten

    @property
    def held(self) -> Sequence[Any]:
        if self._like is not None:
            raise AsWritten
        return self._held

    @property
    def tensors(self) -> Sequence[Tensor]:
        if not self._are_tensors and not {*map(type, self.held)} <= _TENSORS:
            raise AsWritten
        self._are_tensors = True
        return self._held

    @property
    def is_made(self) -> bool:
        return self._like is not None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Of all of them: their type, their device, and whether autograd follows them."""
        if self._like is not None:
            return self._like.kind
        if not self._kind:
            tensors = self.tensors
            if any(len({*map(one, tensors)}) > 1 for one in (_DTYPE, Tensor.get_device, _REQUIRES_GRAD)):
                raise Uneven([*map(_KIND, tensors)])
            self._kind = _KIND(tensors[0])
        return self._kind

    @property
    def shapes(self) -> Sequence[Any]:
        if self._like is not None:
            return self._like.shapes
        self._shapes = self._shapes or [*map(Tensor.size, self.tensors)]
        return self._shapes

    # what a turn asks of them

    @property
    def dtype(self) -> torch.dtype:
        return self.kind[0]

    @property
    def requires_grad(self) -> bool:
        return bool(self.kind[2]) and not self.is_made

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def attribute(self, name: str) -> Column | None:
        """`p.data` or `p.grad`."""
        if name not in self._attributes:
            found = [getattr(one, name) for one in self.tensors]
            known = [one is not None for one in found]
            if any(known) and not all(known):
                raise Uneven(known)
            self._attributes[name] = Column(self.turns, found) if any(known) else None
        return self._attributes[name]

    def set_attribute(self, name: str, changed: object) -> None:
        """As `p.grad *= 2` does: it is what it was."""
        if changed is None or changed is not self._attributes.get(name):
            raise AsWritten

    data = property(lambda one: one.attribute("data"), lambda one, to: one.set_attribute("data", to))
    grad = property(lambda one: one.attribute("grad"), lambda one, to: one.set_attribute("grad", to))

    def detach(self) -> Column:
        return self if self.is_made else Column(self.turns, [one.detach() for one in self.tensors])

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AsWritten
        return lambda *given, **options: self._do(name, given, options)

    __neg__ = _method("neg")
    __add__ = __radd__ = _method("add")
    __mul__ = __rmul__ = _method("mul")
    __sub__, __truediv__ = _method("sub"), _method("div")
    __iadd__, __isub__, __imul__ = _method("add_"), _method("sub_"), _method("mul_")

    def _do(self, name: str, given: tuple[Any, ...], options: dict[str, Any]) -> Column:
        operator, end = name.removesuffix("_"), "_" * name.endswith("_")
        self.turns.uses(name)
        if operator == "clamp":
            made, bounds = self, dict(zip(("min", "max"), given, strict=False)) | options
            for bound in sorted(bounds, reverse=True):
                made = made._note(f"clamp_{bound}", end if made is self else "_", (bounds[bound],), {})
            return made
        if operator == "lerp" and "weight" in options:
            given, options = (*given, options["weight"]), {}
        return self._note(operator, end, given, options)

    def _note(self, operator: str, end: str, given: tuple[Any, ...], options: dict[str, Any]) -> Column:
        """One launch more, if it does the same to tensors that are alike."""
        if not _is_known(operator, given, options):
            raise AsWritten
        columns = (self, *(one for one in given if isinstance(one, Column)))
        rest = tuple(one.tensor if isinstance(one, Single) else one for one in given if not isinstance(one, Column))
        if not _computes_in_one_type(operator, (*columns, *rest)) or not all(map(self._goes_with, columns)):
            raise AsWritten
        made = None if end else Column(self.turns, (), self)
        function = getattr(torch, f"_foreach_{operator}{end}")
        self.turns.launches.append(JointLaunch(function, columns, rest, options, made))
        return self if made is None else made

    def _goes_with(self, other: Column) -> bool:
        """Whether both are of the same shapes on the same GPU, and no gradient is asked for."""
        same = self.kind[1].type == "cuda" and other.kind[1] == self.kind[1] and other.shapes == self.shapes
        return same and not (other.requires_grad and torch.is_grad_enabled())


def _is_known(operator: str, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether PyTorch has a joint launch for it with these arguments."""
    form = "".join(map(_letter, given))
    known = () if form == "n" else (_OPTIONS.get(operator),)
    return form in _FORMS[operator] and all(one in known and _letter(options[one]) == "n" for one in options)


def _computes_in_one_type(operator: str, operands: Iterable[Any]) -> bool:
    """What only moves values may change their type."""
    types = {one.dtype for one in operands if isinstance(one, Column | Tensor)}
    moves = operator in ("zero", "copy")
    return (len(types) == 1 and types <= _FLOATS) or (moves and (len(types) == 1 or types <= _FLOATS))


class JointTurns:
    """What turns of one kind do to their tensors."""

    def __init__(self, methods: dict[str, Any], places: Sequence[int]) -> None:
        self._methods = methods
        self.places = places
        """Which turns of the loop these are."""
        self.launches: list[JointLaunch] = []

    def uses(self, name: str) -> None:
        """Somebody may have put another in its place."""
        if getattr(Tensor, name) is not self._methods[name]:
            raise AsWritten

    @property
    def columns(self) -> Iterator[Column]:
        """Those that are there before."""
        return (one for launch in self.launches for one in launch.columns if not one.is_made)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What says how it rounds."""
        return tuple(
            (one.function, *map(type, one.rest), *(column.kind for column in one.columns)) for one in self.launches
        )

    def take_memory(self, memory: TakenMemory) -> None:
        singles = [one for launch in self.launches for one in launch.rest if isinstance(one, Tensor)]
        memory.take(singles, [-1] * len(singles))
        for column in {id(one): one for one in self.columns}.values():
            memory.take(column.tensors, self.places)

    def run(self, count: int, copies: dict[int, Tensor] | None = None) -> None:
        """The first of its turns; of copies, by the place of what they were made of, if there are any."""
        for first, last in self._parts(count):
            held: dict[int, Sequence[Tensor]] = {id(one): one.tensors[first:last] for one in self.columns}
            if copies is not None:
                held = {number: [copies.get(one.data_ptr(), one) for one in some] for number, some in held.items()}
            for function, columns, rest, options, made in self.launches:
                result = function(*(held[id(one)] for one in columns), *rest, **options)
                if made is not None:
                    held[id(made)] = result

    def _parts(self, count: int) -> Iterator[tuple[int, int]]:
        """So many turns at once that what is made in between needs little memory."""
        makers = [
            launch.columns[0].tensors
            for launch in self.launches
            if launch.made is not None and not launch.columns[0].is_made
        ]
        first = size = 0
        for turn in range(count if makers else 0):
            more = sum(one[turn].nbytes for one in makers)
            if size + more > _AT_ONCE and turn > first:
                yield first, turn
                first, size = turn, 0
            size += more
        yield first, count


class TakenMemory:
    """Which turn's tensors lie where. Few objects are made, for Python's garbage collection looks at each."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._turns: list[int] = []

    def take(self, tensors: Sequence[Tensor], turns: Sequence[int]) -> None:
        """Each fills the memory that it spans."""
        for one in tensors:
            if not one.is_contiguous() and not one.is_contiguous(memory_format=torch.channels_last):
                raise AsWritten
        self._tensors += tensors
        self._turns += turns

    def stands_apart(self) -> bool:
        """Whether no tensor reaches into another, but for the same one in one turn."""
        places, end = [*map(Tensor.data_ptr, self._tensors)], 0
        sizes = dict(zip(places, map(_BYTES, self._tensors), strict=True))
        if len(sizes) < len(places) and not self._are_same_where_they_meet(places):
            return False
        for place in sorted(sizes):
            if place < end:
                return False
            end = place + sizes[place]
        return True

    def _are_same_where_they_meet(self, places: Sequence[int]) -> bool:
        first: dict[int, int] = {}
        for at, place in enumerate(places):
            known = first.setdefault(place, at)
            one, other = self._tensors[known], self._tensors[at]
            if place and (
                self._turns[known] != self._turns[at] or (one is not other and not _is_same_view(one, other))
            ):
                return False
        return True


def _letter(value: Any) -> str:
    kind = type(value)
    return "c" if kind is Column else "n" if kind is int or kind is float else "t" if kind is Single else "?"


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


class ForeachLoops:
    """What rewritten loops go through; it is `__keepbusy_foreach__` there."""

    def __init__(self) -> None:
        self.switch = FixSwitch("foreach", "loops over tensors made as one launch for all of them")
        self._methods: dict[str, Any] = {}
        self._in_vain: Counter[int] = Counter()
        self._same: Counter[Any] = Counter()
        self._different: set[Any] = set()

    def patch(self, patches: Patches) -> None:
        self._methods = {name: getattr(Tensor, name) for name in METHODS}
        patches.later(self._methods.clear)

    def left(
        self, turn: Callable[..., None], remake: Callable[..., Iterable[Any]], leaves_names: bool, *sources: Any
    ) -> Iterable[Any]:
        """What the loop is to go through itself."""
        if torch.compiler.is_compiling() or not self._may_try(turn, sources):
            return remake(*sources)
        sources = tuple([*one] if isinstance(one, GeneratorType) else one for one in sources)
        items = _items(remake(*sources))
        return remake(*sources) if items is None else self._left_of(turn, leaves_names, items, sys._getframe(1))

    def _left_of(
        self, turn: Callable[..., None], leaves_names: bool, items: list[Any], frame: FrameType
    ) -> Iterable[Any]:
        """Of all that it goes through."""
        loop, joint = id(turn.__code__), self._apart(turn, items)
        if joint is None:
            self._in_vain[loop] += 1
            return items
        last = min(one.places[-1] for one in joint) if leaves_names else len(items) - 1
        key = (loop, *(one.signature for one in joint))
        if key in self._different or last < 1 or not any(one.launches for one in joint):
            return items
        if self._same[key] < CHECKED:
            return self._both_ways(key, joint, items, place_of(frame))
        for one in joint:
            one.run(bisect_left(one.places, last))
        self.switch.count(frame)
        return items[last:]

    def _may_try(self, turn: Callable[..., None], sources: Sequence[Any]) -> bool:
        watched = is_watched() or torch.is_autocast_enabled("cuda")
        may = self.switch.on and not watched and self._in_vain[id(turn.__code__)] <= _VAIN
        return may and all(map(_is_plain, sources))

    def _apart(self, turn: Callable[..., None], items: Sequence[Any]) -> list[JointTurns] | None:
        """What the turns do; None where they cannot be made together, whyever: the loop itself will come to it."""
        try:
            joint, memory = self._joint(turn, items, range(len(items))), TakenMemory()
            for one in joint:
                one.take_memory(memory)
            return joint if memory.stands_apart() else None
        except Exception:
            return None

    def _joint(self, turn: Callable[..., None], items: Sequence[Any], places: Sequence[int]) -> list[JointTurns]:
        turns = JointTurns(self._methods, places)
        try:
            turn(_columns(turns, items), free, part)
        except Uneven as uneven:
            kinds = defaultdict(list)
            for at, kind in enumerate(uneven.kinds):
                kinds[kind].append(at)
            return [
                one
                for some in kinds.values()
                for one in self._joint(turn, [items[at] for at in some], [places[at] for at in some])
            ]
        return [turns]

    def _both_ways(self, key: Any, joint: Sequence[JointTurns], items: Sequence[Any], place: Place) -> Iterator[Any]:
        """All turns as they are written, after the same was done to copies; and then compared."""
        tensors = {
            one.data_ptr(): one.detach() for turns in joint for column in turns.columns for one in column.tensors
        }
        tensors.pop(0, None)  # those with no elements
        if sum(one.nbytes for one in tensors.values()) > torch.cuda.mem_get_info()[0] // 4:
            yield from items
            return
        with torch.no_grad(), ours():
            copies = {at: one.clone() for at, one in tensors.items()}
            for turns in joint:
                turns.run(len(turns.places), copies)
        yield from items
        self.switch.checked += 1
        self._same[key] += 1
        with ours():
            if not all(torch.equal(_bits(tensors[at]), _bits(copies[at])) for at in tensors):
                self._different.add(key)
                self.switch.notes.append(
                    f"{shown(place[0])}:{place[1]} would round otherwise, and runs as it is written"
                )


def _items(gone_through: Iterable[Any]) -> list[Any] | None:
    """All at once; None where that would do something else as well, or fails: the turns before come first then."""
    try:
        return [*gone_through] if type(gone_through) in (zip, enumerate, *_HELD) else None
    except ValueError:
        return None


def _columns(turns: JointTurns, items: Sequence[Any]) -> Any:
    """In place of what one turn is given."""
    if {*map(type, items)} == {tuple} and len({*map(len, items)}) == 1:
        return tuple(_columns(turns, one) for one in zip(*items, strict=True))
    return Column(turns, items)


def _is_plain(source: Any) -> bool:
    """Whether to go through it does nothing else."""
    if not isinstance(source, GeneratorType):
        return type(source) in _HELD
    module = (source.gi_frame.f_locals if source.gi_frame else {}).get("self")
    return source.gi_code in _LOOKUPS and all(
        getattr(type(module), name) is getattr(nn.Module, name) for name in _LOOKS_UP
    )


def free(value: Any, *names: str) -> Any:
    """What a name outside of the loop holds, or an attribute of it: a number, or what holds such."""
    for name in names:
        if any("__getattribute__" in vars(one) for one in type(value).__mro__[:-1]):
            raise AsWritten
        value = getattr_static(value, name)
    if type(value) is Tensor and value.ndim == 0 and value.is_cuda:
        return Single(value)
    if type(value) not in (int, float, bool, str, type(None), list, tuple, *_NAMED):
        raise AsWritten
    return value


def part(held: Any, key: Any) -> Any:
    """`held[key]`, where either may be one thing in each turn."""
    if isinstance(held, Column):
        if isinstance(key, Column) or not all(type(one) in _NAMED and key in one for one in held.held):
            raise AsWritten
        return Column(held.turns, [one[key] for one in held.held])
    if isinstance(key, Column) and (type(held) in (list, tuple) or all(one in held for one in key.held)):
        return Column(key.turns, [held[one] for one in key.held])
    return free(held[key])


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


class FusedOptimizers:
    """`fused=True` where the program chose no implementation and all parameters are floats of one device."""

    def __init__(self) -> None:
        self.switch = FixSwitch(
            "fused", "optimizers that step in one launch", tolerance="a step's weights differ by rounding, 1e-6 of them"
        )

    def patch(self, patches: Patches) -> None:
        for name in _KINDS:
            kind = getattr(torch.optim, name)
            if "fused" in inspect.signature(kind.__init__).parameters:
                patches.replace(kind, "__init__", self._making)

    def _making(self, plain: Function) -> Function:
        def init(optimizer: Any, params: Any, *args: Any, **options: Any) -> None:
            if not self.switch.on or any(options.get(one) is not None for one in _CHOICES):
                plain(optimizer, params, *args, **options)
                return
            held = list(params)
            is_fused = _may_be_fused(held)
            plain(optimizer, held, *args, **({**options, "fused": True} if is_fused else options))
            if is_fused:
                self.switch.count()
                optimizer.register_step_pre_hook(self._before)

        return init

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A closure would be called twice, and a scaler's gradients are unscaled within the step."""
        if self.switch.checked >= CHECKED or len(args) > 1 or kwargs or hasattr(optimizer, "grad_scale"):
            return
        size = sum(one.nbytes for one in _tensors(optimizer))
        if torch.cuda.mem_get_info()[0] < 4 * size:
            return
        self.switch.checked += 1
        with ours():
            twin = _unfused(optimizer)
            type(optimizer).step.__wrapped__(twin)  # whoever counts steps is not to count this one

        def after(*_: Any) -> None:
            hook.remove()
            self._compare(optimizer, twin)

        hook: Any = optimizer.register_step_post_hook(after)

    def _compare(self, optimizer: Any, twin: Any) -> None:
        pairs = list(zip(_tensors(optimizer), _tensors(twin), strict=True))
        if all(_is_near(one, other) for one, other in pairs):
            return
        self.switch.stop("a step came out different")
        with torch.no_grad():
            for one, other in pairs:
                one.copy_(other)
                optimizer.state[one] = twin.state[other]
        for group in optimizer.param_groups:
            group["fused"] = None


def _unfused(optimizer: Any) -> Any:
    """An optimizer of copies, in the same state."""
    twin, copies = copy.copy(optimizer), dict[Any, Any]()
    for one in _tensors(optimizer):
        copies[one] = one.detach().clone()
        copies[one].grad = None if one.grad is None else one.grad.clone()
    groups = optimizer.param_groups
    twin.param_groups = [{**one, "params": [copies[part] for part in one["params"]], "fused": None} for one in groups]
    twin.state = defaultdict(dict)
    for one, state in optimizer.state.items():
        cloned = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        twin.state[copies[one]] = cloned | ({"step": cloned["step"].cpu()} if "step" in cloned else {})
    return twin


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    rounding = max(_ROUNDING, 4 * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other, rtol=rounding, atol=_SMALLEST, equal_nan=True)


def _may_be_fused(params: list[Any]) -> bool:
    tensors: list[Any] = []
    for one in params:
        group = one["params"] if isinstance(one, dict) else one[1] if isinstance(one, tuple) else one
        if isinstance(group, torch.Tensor):
            tensors.append(group)
        elif isinstance(group, list | tuple):
            tensors += group
        else:
            return False  # what can be run through once only is the optimizer's
    return all(isinstance(one, torch.Tensor) and one.is_cuda and one.is_floating_point() for one in tensors)
