"""Each fix as it is written: nothing but its own lines changes, comments stay, and it is written once."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("libcst")

from keepbusy.fix.source.proof import RunResults
from keepbusy.fixes import ASKED_FOR, FIXES, WRITTEN
from keepbusy.fixes.source.at_lines import changed_lines, moved_lines
from keepbusy.fixes.source.rewriting import edited

EVERY_EDIT = [*WRITTEN[1:], "num_workers=8", "prepare_in_workers without persistent_workers"]
LOOP = """\
import torch
from torch.utils.data import DataLoader  # loads

def train(model, data, optimizer):
    loader = DataLoader(
        data,
        batch_size=32,  # fits
    )
    other = DataLoader(data, 64, num_workers=0)
    total = 0.0
    for step, (x, y) in enumerate(loader):  # all of them
        x = x.to("cuda")
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()  # once a step
        if step % 10 == 0:
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
    torch.save(model.state_dict(), "last.pt")
    return total / len(loader)
"""


def changed(source: str, fix: str, *lines: int) -> tuple[list[str], list[str]]:
    """Lines taken out, and lines put in."""
    new = edited(source, fix, lines)
    assert new is not None
    compile(new, "train.py", "exec")
    before, after = source.splitlines(), new.splitlines()
    return [one for one in before if one not in after], [one for one in after if one not in before]


def test_the_loop_is_wrapped_and_its_loader_pins() -> None:
    assert changed(LOOP, "prefetch", 12) == (
        ["    for step, (x, y) in enumerate(loader):  # all of them"],
        [
            "import keepbusy",
            "        pin_memory=True,",
            "    for step, (x, y) in enumerate(keepbusy.prefetch(loader)):  # all of them",
        ],
    )


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        ("labels = one_hot(y.numpy())", True),
        ("weight = np.sum(x[0])", True),
        ("y.long().numpy()", True),
        ("shown = x.cpu().numpy()", False),
        ("count = np.sum(counts)", False),
    ],
)
def test_batches_that_the_host_needs_are_not_sent_ahead(line: str, stays: bool) -> None:
    source = f"for x, y in loader:\n    {line}\n    x, y = x.cuda(), y.cuda()\n"
    assert (edited(source, "prefetch", [3]) is None) == stays


def test_only_the_loader_of_the_loop_gets_workers() -> None:
    out, put = changed(LOOP, "num_workers=8", 11)
    assert out == []
    assert [one.strip() for one in put] == ["num_workers=8,", "persistent_workers=True,"]
    assert "num_workers=4" in (
        edited(LOOP.replace("enumerate(loader)", "enumerate(other)"), "prepare_in_workers", [11]) or ""
    )


def test_a_sum_is_read_once() -> None:
    assert changed(LOOP, "readback", 16) == (
        ["        total += loss.item()  # once a step"],
        ["        total += loss.detach().double()  # once a step", "    total = float(total)"],
    )
    looked_at = LOOP.replace("        torch.cuda.empty_cache()", "        print(total)")
    assert edited(looked_at, "readback", [16]) is None


READS = """\
def train(loader, model, losses):
    total, correct, mine = 0.0, 0, []
    for step, (x, y) in enumerate(loader):
        out = model(x)
        loss = (out - y).square().mean()
        loss.backward()
        total += loss.item() * x.size(0)
        correct += (out > y).sum().item()
        losses.append(loss.item())
        mine.append(loss.item())
        last = loss.item()
        if step % 2 == 0:
            print(f"{total / (step + 1):.3f} {correct} {last}")
            total = 0.0
    return total, correct, mine, last
"""
PUT_OFF = """\
def train(loader, model, losses):
    total, correct, mine = 0.0, 0, []
    for step, (x, y) in enumerate(loader):
        out = model(x)
        loss = (out - y).square().mean()
        loss.backward()
        total += loss.detach().double() * x.size(0)
        correct += (out > y).sum()
        losses.append(loss.item())
        mine.append(loss.detach().clone())
        last = loss.detach().clone()
        if step % 2 == 0:
            print(f"{float(total) / (step + 1):.3f} {int(correct)} {float(last)}")
            total = 0.0
    total = float(total)
    correct = int(correct)
    mine = [float(one) for one in mine]
    last = float(last)
    return total, correct, mine, last
"""


def test_reads_of_all_kinds_give_what_they_gave(capsys: pytest.CaptureFixture[str]) -> None:
    assert edited(READS, "readback", range(1, 20)) == PUT_OFF
    pytest.importorskip("torch.nn")  # a folder of tests is called torch, too
    import torch

    torch.manual_seed(0)
    batches, told = [(torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)) for _ in range(5)], []
    for source in (READS, PUT_OFF):
        names: dict[str, Any] = {}
        exec(source, names)
        told.append((names["train"](batches, torch.tanh, []), capsys.readouterr().out))
    assert told[0] == told[1]
    assert isinstance(told[1][0][1], int)


@pytest.mark.parametrize(
    ("fix", "line", "gone"),
    [
        ("keep_memory", 19, "        torch.cuda.empty_cache()"),
        ("drop_sync", 18, "            torch.cuda.synchronize()"),
    ],
)
def test_a_call_is_taken_out(fix: str, line: int, gone: str) -> None:
    out, put = changed(LOOP, fix, line)
    assert out == [gone]
    assert put in ([], ["            pass"])


def test_a_checkpoint_is_saved_later() -> None:
    assert changed(LOOP, "save_later", 20) == (
        ['    torch.save(model.state_dict(), "last.pt")'],
        ["import keepbusy", '    keepbusy.save_later(model.state_dict(), "last.pt")'],
    )


RANKED = """\
def main(loader, optimizer):
    model = DDP(net.cuda())
    for i, (x, y) in enumerate(loader):  # four to a step
        loss = model(x).mean() / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_gradients_travel_with_the_last_micro_batch() -> None:
    put = "        model.require_backward_grad_sync = "
    assert changed(RANKED, "accumulate", 5) == ([], [f"{put}(i + 1) % 4 == 0"])
    inner = "net = DDP(m)\nfor one in range(n):\n    net(x()).backward()\noptimizer.step()\n"
    assert changed(inner, "accumulate", 3) == ([], ["    net.require_backward_grad_sync = one == n - 1"])


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("DDP(net.cuda())", "net.cuda()"),  # nothing travels
        ("(i + 1) % 4 == 0", "loss > 1"),  # nobody knows before
        ("        if (i + 1) % 4 == 0:\n    ", "    "),  # each is the last
        ("loss.backward()", "with model.no_sync(): loss.backward()"),  # it is done
    ],
)
def test_gradients_are_left_where_nobody_knows_which_is_the_last(part: str, other: str) -> None:
    assert part in RANKED
    assert edited(RANKED.replace(part, other), "accumulate", range(1, 9)) is None


@pytest.mark.parametrize("header", ["for k in range(n)", "for k, x in enumerate(batches)"])
def test_a_loop_that_does_not_go_back_has_no_last_gradients(header: str) -> None:
    source = f"net = DDP(m)\n{header}:\n    losses[k] = net(x(k)).item()\n"
    assert edited(source, "accumulate", [3]) is None


MASKED = """\
import torch

def make():
    train_mask = torch.zeros(9, dtype=torch.bool)
    return train_mask

def main(model, x, y, optimizer):
    train_mask = make()
    train_mask[:5] = True
    train_mask = train_mask.cuda()

    def train():
        out = model(x)
        return loss(out[train_mask], y[train_mask])

    for epoch in range(9):
        train().backward()
        optimizer.step()
"""


def test_the_indices_of_a_mask_that_is_always_the_same_are_taken_once() -> None:
    assert changed(MASKED, "take_indices_once", 14) == (
        ["        return loss(out[train_mask], y[train_mask])"],
        [
            "    train_mask_indices = train_mask.nonzero(as_tuple=True)",
            "        return loss(out[train_mask_indices], y[train_mask_indices])",
        ],
    )
    other = MASKED.replace("epoch in range(9):\n", "epoch in range(9):\n        print(out[train_mask])\n")
    first = edited(other, "take_indices_once", [14])
    assert first is not None
    both = edited(first, "take_indices_once", [18])
    assert both is not None
    assert both.count(".nonzero(") == 1
    assert "print(out[train_mask_indices])" in both


def test_so_are_those_of_a_mask_in_an_object() -> None:
    source = """\
data = load()
data = data.to("cuda")
for epoch in range(9):
    error = loss(model(data)[data.train_mask], data.y[data.train_mask])
"""
    assert changed(source, "take_indices_once", 4)[1] == [
        "data_train_mask_indices = data.train_mask.nonzero(as_tuple=True)",
        "    error = loss(model(data)[data_train_mask_indices], data.y[data_train_mask_indices])",
    ]


@pytest.mark.parametrize(("use", "is_constant"), [("print(out[mask].sum())", True), ("change(mask)", False)])
def test_a_mask_may_choose_by_the_name_of_a_loop(use: str, is_constant: bool) -> None:
    test = f"    def test():\n        for mask in [train_mask, other]:\n            {use}\n"
    source = MASKED.replace("    for epoch", f"{test}    for epoch")
    assert source != MASKED
    assert (edited(source, "take_indices_once", [14]) is not None) == is_constant


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("out[train_mask], y[train_mask]", "out[train_mask], y[order]"),  # which of them is the mask?
        ("y[train_mask])", "y[train_mask], x[x > 0])"),
        ("y[train_mask])", "torch.nonzero(y[train_mask]))"),  # is it one?
        ("out = model(x)\n", "out = model(x)\n        train_mask = out > 0\n"),
        ("        train().backward()", "        train_mask[epoch] = True\n        train().backward()"),
        ("        train().backward()", "        train_mask.fill_(epoch)\n        train().backward()"),
        ("        train().backward()", "        grow(train_mask)\n        train().backward()"),
        ("    def train():", "    def train(train_mask):"),
        ("    train_mask = train_mask.cuda()\n", "    if x:\n        train_mask = train_mask.cuda()\n"),
        ("def main(", "train_mask = 1\ndef main("),
        ("    def train():\n", "    def train():\n        nonlocal train_mask\n"),
        ("import torch\n", "import torch\ntrain_mask_indices = 5\n"),
    ],
)
def test_a_mask_that_may_change_is_asked_each_time(part: str, other: str) -> None:
    source = MASKED.replace(part, other)
    assert source != MASKED
    [line] = [at for at, text in enumerate(source.splitlines(), 1) if "return loss" in text]
    assert edited(source, "take_indices_once", [line]) is None


def test_a_mask_that_is_made_where_it_chooses_is_no_constant() -> None:
    source = "def step(x):\n    kept = x > 0\n    return x[kept].sum()\n"
    assert edited(source, "take_indices_once", [3]) is None


def test_a_masked_mean_has_a_shape_that_the_host_knows() -> None:
    assert changed("loss = 2 * error[valid].mean() + x[valid].sum()\n", "keep_shapes", 1)[1] == [
        "loss = 2 * (torch.where(valid, error, 0).sum() / valid.sum()) + torch.where(valid, x, 0).sum()"
    ]


def test_workers_that_somebody_chose_are_left() -> None:
    source = "loader = DataLoader(data, num_workers=options.workers)\nfor x in loader: pass\n"
    assert edited(source, "prepare_in_workers", [2]) is None
    assert edited(source.replace("options.workers", "6"), "num_workers=6 without persistent_workers", [2]) is None


@pytest.mark.parametrize("kept", ["", " without persistent_workers"])
def test_fewer_workers_than_keep_up_become_as_many(kept: str) -> None:
    source = "loader = DataLoader(data, num_workers=2)\nfor x in loader: pass\n"
    given = "num_workers=6" if kept else "num_workers=6, persistent_workers=True"
    assert edited(source, f"num_workers=6{kept}", [2]) == source.replace("num_workers=2", given)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (
            "x = torch.arange(0, n).unsqueeze(0).repeat(b, 1).to(device)",
            "x = torch.arange(0, n, device=device).unsqueeze(0).repeat(b, 1)",
        ),
        ("m = torch.tril(torch.ones(t, t)).to(x.device)", "m = torch.tril(torch.ones(t, t, device=x.device))"),
        ("x = torch.arange(n).sin().cuda()", None),  # rounded differently
        ('x = torch.zeros(3, 4).to("cuda")', 'x = torch.zeros(3, 4, device="cuda")'),
        ("x = torch.arange(n).cuda() + 1  # places", 'x = torch.arange(n, device="cuda") + 1  # places'),
        ("x = torch.ones(3).to(device)", "x = torch.ones(3, device=device)"),
        ('x = torch.randn(3).to("cuda")', None),  # other numbers
        ("x = torch.zeros(3).to(torch.float16)", None),
        ('x = torch.zeros(3, device="cpu").to("cuda")', None),
        ('x = numpy.zeros(3).to("cuda")', None),
    ],
)
def test_a_tensor_is_made_where_it_is_needed(written: str, meant: str | None) -> None:
    new = edited(f"import torch\n{written}\n", "make_on_device", [2])
    assert new == (None if meant is None else f"import torch\n{meant}\n")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("x = torch.from_numpy(s).to(device)", "x = torch.from_numpy(s).to(device, non_blocking=True)"),
        ("x = f(torch.Tensor(s).unsqueeze(0).cuda())", "x = f(torch.Tensor(s).unsqueeze(0).cuda(non_blocking=True))"),
        ("x = torch.tensor(s, device=device)", "x = torch.tensor(s).to(device, non_blocking=True)"),
        (
            "x = torch.as_tensor(s, dtype=torch.float32, device=device)",
            "x = torch.as_tensor(s, dtype=torch.float32).to(device, non_blocking=True)",
        ),
        ("x = th.tensor(s, device=self.device)", "x = th.tensor(s).to(self.device, non_blocking=True)"),
        ("x, y = x[i].to(device), f(y)", "x, y = x[i].to(device, non_blocking=True), f(y)"),
        ("x = torch.tensor(s).to(device, torch.float16)", None),
        ("x = torch.tensor(s).to(torch.float16)", None),
        ("x = torch.tensor(s).to(device, non_blocking=False)", None),
        ("x = torch.tensor(s, device=device, requires_grad=True)", None),
    ],
)
def test_a_small_copy_is_not_waited_for(written: str, meant: str | None) -> None:
    new = edited(f"import torch\n{written}\n", "copy_without_waiting", [2])
    assert new == (None if meant is None else f"import torch\n{meant}\n")


def test_an_optimizer_is_fused_unless_it_chose_otherwise() -> None:
    source = "import torch\na = torch.optim.AdamW(p, lr=1e-3)\nb = torch.optim.SGD(p, foreach=True)\nc = Adam(p)\n"
    assert changed(source, "fuse_optimizer", 2) == (
        ["a = torch.optim.AdamW(p, lr=1e-3)"],
        ["a = torch.optim.AdamW(p, lr=1e-3, fused=True)"],
    )
    for arguments in ("p, lr=1e-3, **extra", "**settings"):  # which may say fused already, as nanoGPT's does
        assert edited(f"import torch\na = torch.optim.AdamW({arguments})\n", "fuse_optimizer", [2]) is None


@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("source", "fix", "line"), [(LOOP, "keep_memory", 19), (READS, "readback", 7)])
def test_ends_of_lines_stay_as_they_are(source: str, fix: str, line: int, begin: str, end: str) -> None:
    plain = edited(source, fix, [line])
    assert plain is not None
    foreign = begin + source.rstrip().replace("\n", end)
    assert edited(foreign, fix, [line]) == begin + plain.rstrip().replace("\n", end)


@pytest.mark.parametrize(
    ("fix", "line", "places"),
    [("readback", 16, [16]), ("fuse_optimizer", 1, []), ("keep_memory", 19, [19]), ("num_workers=8", 11, [8])],
)
def test_a_change_is_told_of_where_it_stands(fix: str, line: int, places: list[int]) -> None:
    """A form feed ends no line of Python's."""
    source = f"x = 1  # \f\n{LOOP}"
    assert changed_lines(source, edited(source, fix, [line + 1]) or source) == [one + 1 for one in places]


def test_fixes_serve_each_other_only_where_they_can_be_written() -> None:
    assert {other for fix in FIXES for other in fix.served_by} == {fix.name for fix in FIXES if fix.source_edit()}


def test_what_may_change_results_is_made_in_memory_only_where_it_is_named() -> None:
    """A graph checks itself as it runs."""
    edits = {fix.name: edit for fix in FIXES if (edit := fix.source_edit())}
    may = {name for name, edit in edits.items() if edit.tolerance or edit.why}
    assert {*ASKED_FOR} == (may - {"graph"}) | {"num_workers"}


@pytest.mark.parametrize("fix", EVERY_EDIT)
def test_what_was_written_is_not_written_again(fix: str) -> None:
    every = range(1, 25)
    once = edited(LOOP, fix, every)
    assert once is None or edited(once, fix, range(1, 30)) is None


@pytest.mark.parametrize("fix", EVERY_EDIT)
def test_other_lines_are_left_alone(fix: str) -> None:
    assert edited(LOOP, fix, [1000]) is None or fix in ("pin_memory", "prepare_in_workers", "fuse_optimizer")


@pytest.mark.parametrize(
    ("losses", "last", "why"),
    [
        ([2.0, 1.5, 0.25], [4.0], ""),  # captured twice: at first, and for the last batch, which is smaller
        ([2.0, 1.5], [5.0], "its weights differ by up to 25%, and may by 0.01%"),
        ([2.0, 1.5, 0.5, 0.25], [4.0], "its losses differ by up to 50%, and may by 0.01%"),  # none is replayed
        ([2.0, 1.5, 1.0, 0.25], [4.0], ""),
    ],
)
def test_losses_are_compared_where_each_is_of_a_known_step(losses: list[float], last: list[float], why: str) -> None:
    own = RunResults(losses=[2.0, 1.5, 1.0, 0.25], last=[4.0])
    assert own.same(RunResults(losses=losses, last=last), 1e-4) == why


def test_lines_are_found_again_after_other_fixes() -> None:
    once = edited(LOOP, "prefetch", [12]) or ""
    moved = moved_lines(LOOP, once)
    assert once.splitlines()[moved[16] - 1] == "        total += loss.item()  # once a step"
    assert 11 not in moved


def test_a_source_that_cannot_be_read_is_left_alone() -> None:
    assert edited("def (:", "prefetch", [1]) is None
    assert edited(LOOP, "no such fix", [1]) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("total += loss.item()", "total += count.item()"),  # perhaps a whole number, and so the sum
        ("    total = 0.0", "    total = None"),
        ("    for x in loader:", "    try:\n      for x in loader:"),
        ("print(total)", 'print(f"{total=}")'),
        ("    for x in loader:", "    for epoch in epochs:\n     print(total)\n     for x in loader:"),
    ],
)
def test_a_read_stays_where_what_it_gives_would_be_seen_to_differ(before: str, after: str) -> None:
    source = """\
def train(loader, model):
    total = 0
    for x in loader:
        loss = model(x)
        loss.backward()
        total += loss.item()
        if x is None:
            print(total)
    return total
"""
    assert edited(source, "readback", range(1, 12)) is not None
    changed = source.replace(before, after) if before in source else source.replace("    total = 0", after)
    if "try" in after:
        changed = changed.replace("    return", "    except ValueError: pass\n    return")
    compile(changed, "train.py", "exec")
    assert edited(changed, "readback", range(1, 14)) is None
