"""When a loader's batches are there, by what its workers say of themselves."""

from __future__ import annotations

from keepbusy.virtual.pytorch.host_side import Worker


def test_a_worker_is_done_its_work_after_it_was_asked() -> None:
    worker = Worker()
    worker.ask(0, now=100)
    worker.note_duration(0, 40)
    assert worker.ready_time(0) == 140


def test_a_worker_does_one_batch_after_the_other() -> None:
    worker = Worker()
    for batch in (0, 4, 8):
        worker.ask(batch, now=100)
        worker.note_duration(batch, 40)
    assert [worker.ready_time(batch) for batch in (0, 4, 8)] == [140, 180, 220]
    worker.ask(12, now=500)
    worker.note_duration(12, 40)
    assert worker.ready_time(12) == 540


def test_of_a_batch_that_a_worker_says_nothing_of_nothing_is_known() -> None:
    worker = Worker()
    worker.ask(0, now=100)
    assert worker.ready_time(0) is None
    assert worker.ready_time(4) is None


def test_a_new_epoch_counts_its_batches_anew() -> None:
    worker = Worker()
    for batch in (0, 1):
        worker.ask(batch, now=0)
        worker.note_duration(batch, 30)
    assert worker.ready_time(0) == 30  # and here the loop is left
    for batch in (0, 1):
        worker.ask(batch, now=1_000)
        worker.note_duration(batch, 50)
    assert [worker.ready_time(batch) for batch in (0, 1)] == [1_050, 1_100]
