"""Socket loop: serves pollers, and calls of other threads, while no Trio task can run.

A Trio task that waits for a descriptor costs some 30 us for each wake-up, and at low rates each message is a
wake-up: a pass of the scheduler, two epoll calls and one registration. So the sockets of all pollers, and a
descriptor by which threads ask for calls, are in one epoll object of this module, together with Trio's own.
Trio calls `before_io_wait` of its instruments when it is about to wait. This loop waits instead, and calls
the pollers itself. It returns to Trio as soon as a task can run, a descriptor of Trio is ready or Trio's next
deadline is over. While tasks keep Trio busy, each pass of Trio serves the ready sockets once.

The loop needs Linux's epoll and eventfd, and three private attributes of Trio: its epoll object, its run
queue and its deadlines. Without them, and under a clock of tests, pollers wait in tasks of their own.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import trio

from gateway import clock
from gateway.containment import contained

READ: Final = 1  # EPOLLIN


Ready = list[tuple[int, int]]
"""Ready descriptors with their events."""


class SocketPoller(Protocol):
    """Interface of a poller to the socket loop, which watches its sockets."""

    @property
    def has_work(self) -> bool:
        """True if `turn` must be called even if no socket is ready."""

    def turn(self, now: float, ready: Ready) -> None:
        """Serve the streams of the `ready` descriptors; `now` is in loop-clock seconds."""


class Steps(Protocol):
    """Recorder for the duration of the event loop's steps, such as one turn of a poller."""

    def begin(self) -> None:
        """Start measuring a step."""

    def end(self, name: str) -> None:
        """Record the duration of the step since `begin`, under `name`. A long step is logged."""


class PollerSockets:
    """Sockets of one poller that are watched by the socket loop's epoll object.

    This object has the interface of `select.epoll`; the poller uses it instead of an epoll object of its own.
    """

    def __init__(self, loop: SocketLoop, poller: SocketPoller) -> None:
        self._loop = loop
        self._poller = poller
        self.modify = loop.epoll.modify
        self.unregister = loop.epoll.unregister
        self.fileno = loop.epoll.fileno

    def register(self, descriptor: int, events: int) -> None:
        """Watch `descriptor` for READ, WRITE or both."""
        self._loop.epoll.register(descriptor, events)
        self._loop.owners[descriptor] = self._poller

    def poll(self, timeout: float) -> Ready:
        """Return an empty list, because the socket loop polls and passes ready descriptors to `turn`."""
        return []

    def close(self) -> None:
        """Do nothing: the epoll object belongs to the socket loop, which still uses it."""


class SocketLoop:
    """Replacement for Trio's wait for I/O, which also serves pollers and runs calls from threads.

    `epoll` watches the sockets of all pollers; `owners` has the poller of each descriptor.
    """

    def __init__(self, runner: Any, trio_descriptor: int, steps: Steps) -> None:
        """Create the socket loop of the running Trio loop, whose internal object is `runner`.

        `trio_descriptor` is the descriptor of Trio's epoll object. Raises OSError if the process has no
        descriptors left, and AttributeError if this version of Trio lacks an attribute that the loop needs.
        """
        self._runnable: deque[object] = runner.runq
        self._next_deadline: Callable[[], float] = runner.deadlines.next_deadline
        clock.begin_loop(runner.clock)
        self._steps = steps
        self._trio = trio_descriptor
        self._token = trio.lowlevel.current_trio_token()
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.epoll = select.epoll()
        self.epoll.register(trio_descriptor, READ)
        self.epoll.register(self._wake_up, READ)
        self.owners: dict[int, SocketPoller] = {}
        self._working: dict[SocketPoller, Ready] = {}  # those that have work although no socket is ready
        self._ready_pollers: dict[SocketPoller, Ready] = {}  # those to be served in this pass
        self._calls: deque[Callable[[], None]] = deque()
        self._signalled = False
        self._closed = False
        self._lock = threading.Lock()  # of the descriptor: held while it is written or closed
        self.users = 1  # gateways in this run of Trio

    def forget(self, poller: SocketPoller) -> None:
        """Stop serving `poller`, which has already removed its sockets from the epoll object."""
        self._working.pop(poller, None)
        self._ready_pollers.pop(poller, None)
        self.owners = {descriptor: owner for descriptor, owner in self.owners.items() if owner is not poller}

    def call_soon(self, function: Callable[[], None]) -> None:
        """Make the event loop's thread call `function` soon; any thread may call this method.

        The call is ignored if the loop is closed.
        """
        self._calls.append(function)
        if not self._signalled:
            self._signalled = True
            with self._lock:
                if not self._closed:
                    os.eventfd_write(self._wake_up, 1)

    def close(self) -> None:
        """Run the calls that threads have passed to `call_soon`, and close the epoll object."""
        self.run_calls()
        with self._lock:  # a thread may be about to write
            self._closed = True
            os.close(self._wake_up)
        self.epoll.close()

    def before_io_wait(self, timeout: float) -> None:
        """Serve pollers for at most `timeout` seconds, until Trio has something to do.

        Trio calls this when it is about to wait for I/O.
        """
        try:
            self._serve(timeout)
        except Exception as error:  # Trio removes an instrument that raises
            contained("batch", error)
            self._return_at_once()
        except BaseException as fault:  # ends the process, as one that leaves a task
            self._token.run_sync_soon(_raise, fault)

    def _serve(self, timeout: float) -> None:
        """Serve pollers and run calls from threads until Trio has work, or `timeout` seconds have passed.

        With a timeout of 0, serve what is ready now and return.
        """
        deadline = clock.now() + timeout
        wait = timeout
        while True:
            ready_pollers = self._ready_pollers  # not empty after an error
            ready_pollers.update(self._working)
            self._working.clear()
            ready = self.epoll.poll(0.0 if ready_pollers else wait)
            is_trio_ready = False
            for event in ready:
                descriptor = event[0]
                if descriptor == self._trio:
                    is_trio_ready = True
                elif descriptor == self._wake_up:
                    self.run_calls()
                elif (owner := self.owners.get(descriptor)) is not None:
                    ready_pollers.setdefault(owner, []).append(event)
                else:
                    with suppress(OSError):  # closed by one of the calls
                        self.epoll.unregister(descriptor)
            for poller in list(ready_pollers):
                self._run_turn(poller, ready_pollers.pop(poller))
            if timeout <= 0:
                return  # Trio does not wait now
            wait = 0.0 if self._runnable else min(deadline, self._next_deadline()) - clock.now()
            if wait <= 0:  # even if Trio's descriptor was ready: the task that waited for it may be cancelled
                self._return_at_once()
                return
            if is_trio_ready:
                return

    def _run_turn(self, poller: SocketPoller, ready: Ready) -> None:
        """Serve the `ready` descriptors of `poller`, and schedule another turn if it has more work."""
        self._steps.begin()
        try:
            poller.turn(clock.now(), ready)
        except Exception as error:
            contained("batch", error)
        self._steps.end("sockets")
        if poller.has_work:
            self._working[poller] = []

    def run_calls(self) -> None:
        """Run the calls that other threads have passed to `call_soon` so far."""
        with suppress(BlockingIOError):  # a thread has yet to write it
            os.eventfd_read(self._wake_up)
        self._signalled = False  # after reading: what a thread writes before would be read, and never seen
        self._steps.begin()
        for _ in range(len(self._calls)):
            try:
                self._calls.popleft()()
            except Exception as error:
                contained("store", error)
        self._steps.end("calls of threads")

    def _return_at_once(self) -> None:
        """Make Trio's own wait for I/O return at once.

        Trio computed the timeout of that wait before this loop waited, so that the timeout is too long now.
        """
        self._token.run_sync_soon(_do_nothing, idempotent=True)


def _do_nothing() -> None:
    """Do nothing; Trio is woken up by the scheduled call itself."""


def _raise(error: BaseException) -> None:
    raise error


LOOP: Final[trio.lowlevel.RunVar[SocketLoop | None]] = trio.lowlevel.RunVar("socket loop", None)
"""Socket loop of the running Trio loop; None if none is attached."""


def attach_socket_loop(steps: Steps) -> SocketLoop | None:
    """Attach a socket loop to the running Trio loop, and return the socket loop.

    Pollers that start later use it. If a socket loop is attached already, return that one. Return None if the
    system, the version of Trio or its clock (in tests) does not allow it. The caller must call
    `detach_socket_loop` at the end.
    """
    attached = LOOP.get()
    if attached is not None:
        attached.users += 1
        return attached
    if type(trio.lowlevel.current_clock()).__name__ == "MockClock":  # it may jump while sockets are ready
        return None
    runner: Any = getattr(trio.lowlevel.current_task(), "_runner", None)
    epoll = getattr(getattr(runner, "io_manager", None), "_epoll", None)
    if not isinstance(epoll, select.epoll) or not hasattr(os, "eventfd"):
        return None
    try:
        loop = SocketLoop(runner, epoll.fileno(), steps)
    except (AttributeError, OSError):  # another Trio, or no descriptors
        return None
    trio.lowlevel.add_instrument(cast(trio.abc.Instrument, loop))  # which need not be a subclass
    LOOP.set(loop)
    return loop


def detach_socket_loop(loop: SocketLoop) -> None:
    """Undo one call of `attach_socket_loop`. The last call detaches and closes the loop."""
    loop.users -= 1
    if loop.users:
        return
    LOOP.set(None)
    clock.end_loop()
    with suppress(KeyError):  # Trio has removed it
        trio.lowlevel.remove_instrument(cast(trio.abc.Instrument, loop))
    loop.close()
