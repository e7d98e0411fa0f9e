"""What a server is told at its start. Knows nothing of HTTP libraries, so that `--help` need not load them."""

import ipaddress
from dataclasses import KW_ONLY, dataclass

MIB = 1 << 20


def names_of_loopback(host: str) -> tuple[str, ...]:
    """What a server that listens at `host` may be called by its own machine; nothing if it is open to others."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name: who can reach it is not known
        return ()
    return tuple(dict.fromkeys(["localhost", "127.0.0.1", "::1", host])) if is_loopback else ()


@dataclass(frozen=True)
class Settings:
    _: KW_ONLY
    model: str
    """The name that clients ask for."""
    api_keys: tuple[str, ...] = ()
    """Any of these lets a client in; none: everybody is. Spaces and line ends around them do not count."""
    allowed_hosts: tuple[str, ...] = ()
    """Names without port, one of which a request's Host must have; none: any. A page of another site, whose name its
    owner lets point to this machine (DNS rebinding), gives that name away there."""
    max_queue: int = 256
    """Most texts that wait for a place in the batch; more are answered 429."""
    request_timeout: float | None = 600.0
    """Seconds that a request may take, its time in the queue included; None: as long as it wants."""
    drain_timeout: float = 30.0
    """Seconds that running requests have after SIGTERM."""
    stuck_timeout: float = 60.0
    """A single step of the engine that takes more seconds than this one counts as a fault."""
    body_timeout: float = 60.0
    """Seconds that a client has to send its request's body."""
    send_timeout: float = 60.0
    """Seconds for which a client may leave a stream unread before it is dropped."""
    max_body_bytes: int = 4 * MIB
    log_prompts: bool = False
    """Write prompts into the log."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("served_model_name is empty: give the name that clients shall ask for")
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("api_key is empty: give a key, or leave the option out to let everybody in")
        # Keys out of files end in a line end, which no client can send; `object.__setattr__`, as this is construction
        object.__setattr__(self, "api_keys", tuple(key.strip() for key in self.api_keys))
        if any(not host.strip() for host in self.allowed_hosts):
            raise ValueError("allowed_hosts has an empty name: give names as clients write them, such as localhost")
        if self.max_queue < 0:
            raise ValueError(f"max_queue={self.max_queue} must be at least 0; 0 keeps nobody waiting")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes={self.max_body_bytes} must be at least 1")
        if self.drain_timeout < 0:
            raise ValueError(f"drain_timeout={self.drain_timeout} must be at least 0 seconds")
        for name in ("request_timeout", "stuck_timeout", "body_timeout", "send_timeout"):
            if (seconds := getattr(self, name)) is not None and not seconds > 0:
                raise ValueError(f"{name}={seconds} must be more than 0 seconds")
