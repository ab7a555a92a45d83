"""A thread that the program does not find among its own."""

from __future__ import annotations

import signal
import threading

from warm_python import PATIENCE

from keepbusy.program.processes import UnseenThread, known_thread


def test_it_is_nowhere_among_the_threads_and_can_be_waited_for() -> None:
    let_go, done = threading.Event(), list[int]()
    before = threading.enumerate()
    thread = UnseenThread(lambda: let_go.wait(PATIENCE) and done.append(threading.get_ident()))
    assert threading.enumerate() == before
    thread.join(0.0)  # it is still at work
    assert done == []
    let_go.set()
    for _ in range(2):
        thread.join(PATIENCE)
        assert len(done) == 1
    assert done != [threading.get_ident()]


def test_no_signal_that_the_program_holds_back_comes_to_it() -> None:
    ours, before = set[int](), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    UnseenThread(lambda: ours.update(signal.pthread_sigmask(signal.SIG_BLOCK, ()))).join(PATIENCE)
    assert ours >= {signal.SIGUSR2, signal.SIGTERM}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_to_ask_which_thread_it_is_does_not_make_it_known() -> None:
    found: list[threading.Thread | None] = [known_thread()]
    before = threading.enumerate()
    UnseenThread(lambda: found.append(known_thread())).join(PATIENCE)
    assert found[0] == threading.current_thread()
    assert found[1] is None or found[1] in before  # one that has ended, whose number this one was given
    assert threading.enumerate() == before
