"""`relay serve`: load a policy, or several, and answer observations until stopped."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from tyro.conf import OmitArgPrefixes

from relay.cli.extras import missing_for_models
from relay.cli.options import ListenerOptions, PolicyOptions
from relay.cli.serve_file import InvalidFile, read_serve_file

if TYPE_CHECKING:
    from relay.engine.adapter_folders import AdapterChoice
    from relay.engine.base import Engine, Progress
    from relay.server.policies import Offer
    from relay.server.settings import ServerSettings


@dataclass(frozen=True)
class Serve:
    """Serve policies over WebSocket until Ctrl-C or SIGTERM, then finish what is running."""

    model: tyro.conf.Positional[str]
    """What to serve: demo, pi0, pi05, groot or dreamzero; or a YAML file that names several policies."""

    policy: OmitArgPrefixes[PolicyOptions] = field(default_factory=PolicyOptions)
    listener: OmitArgPrefixes[ListenerOptions] = field(default_factory=ListenerOptions)

    def run(self) -> int:
        from relay.server.app import serve

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("websockets").setLevel(logging.WARNING)  # says what relay says, once more
        try:
            policies, listener = self._choices()
            settings = _settings(listener)
            offers = {name: _offer(model, options, settings) for name, (model, options) in policies.items()}
        except (ValueError, OSError) as error:
            return _fail(str(error))
        missing = missing_for_models("serving")
        if missing:
            return _fail(missing)
        if not offers:
            logging.getLogger(__name__).warning(
                "%s names no policy: clients are told that none is available", self.model
            )
        serve(offers, settings)
        return 0

    def _choices(self) -> tuple[Mapping[str, tuple[str, PolicyOptions]], ListenerOptions]:
        """The policies by name and the listener's options: from the command line, or from the file that it names."""
        if not self.model.endswith((".yaml", ".yml")):
            return {self.model: (self.model, self.policy)}, self.listener
        in_vain = [f"--{name.replace('_', '-')}" for name in _changed(self.policy)]
        if in_vain:
            raise InvalidFile(
                f"{in_vain[0]} belongs to one policy: write it into {self.model}, under the policy's name"
            )
        content = read_serve_file(Path(self.model))
        return content.policies, replace(content.listener, **_changed(self.listener))


def _changed(options: PolicyOptions | ListenerOptions) -> dict[str, Any]:
    return {
        option.name: value for option in fields(options) if (value := getattr(options, option.name)) != option.default
    }


def _settings(listener: ListenerOptions) -> ServerSettings:
    from relay.server.credentials import CredentialFiles
    from relay.server.settings import ServerSettings

    files = CredentialFiles(
        listener.api_keys_file,
        listener.tls_cert,
        listener.tls_key,
        listener.direct_tls_cert,
        listener.direct_tls_key,
        listener.direct_fingerprint,
    )
    credentials = files.read()
    return ServerSettings(
        host=listener.host,
        port=listener.port,
        idle_timeout=listener.idle_timeout,
        api_keys=credentials.api_keys,
        insecure=listener.insecure,
        allowed_origins=listener.allowed_origin,
        allowed_hosts=listener.allowed_host,
        tls=credentials.tls,
        tracebacks=listener.tracebacks,
        max_connections=listener.max_connections,
        max_connections_per_key=listener.max_connections_per_key,
        max_queue=listener.max_queue,
        metrics_host=listener.metrics_host,
        metrics_port=listener.metrics_port,
        direct_url=listener.direct_url,
        direct_host=listener.direct_host,
        direct_port=listener.direct_port,
        direct_tls=credentials.direct_tls,
        direct_cert_sha256=credentials.direct_cert_sha256,
        reread=files.read if files != CredentialFiles() else None,
    )


def _offer(model: str, options: PolicyOptions, settings: ServerSettings) -> Offer:
    """One policy, checked as far as that goes without loading it."""
    from relay.engine.chunking import Chunking
    from relay.models import registry
    from relay.server.policies import Offer

    of_family: dict[str, Any] = {option: getattr(options, option) for option in registry.OWN_OPTIONS}
    registry.check_options(model, of_family)
    registry.checkpoint_folder(model, options.checkpoint)
    adapters = adapter_choice(options, registry.built_in_adapters(model, options.checkpoint))
    Chunking(options.rtc_schedule, options.rtc_max_guidance_weight)  # refuses what it cannot take

    def load(progress: Progress) -> Engine:
        return registry.load(
            model,
            checkpoint=options.checkpoint,
            tokenizer=options.tokenizer,
            device=options.device,
            dtype=options.dtype,
            num_steps=options.num_steps,
            max_batch=options.max_batch,
            default_prompt=options.default_prompt,
            adapters=adapters,
            graphs=options.graphs,
            decode=options.decode,
            progress=progress,
            **of_family,
        )

    own = replace(settings, max_batch=options.max_batch, seed=options.seed, handshake=options.handshake)
    return Offer(load, own)


def adapter_choice(options: PolicyOptions, built_in: Mapping[str, Path]) -> AdapterChoice:
    """What was chosen about adapters, checked as far as that goes without reading them.

    Args:
        built_in: the adapters that come with the policy, held where none are chosen.
    """
    from relay.engine.adapter_folders import AdapterChoice, parse_named

    if not options.adapter_memory > 0:
        raise ValueError(f"--adapter-memory must be above 0 GiB, got {options.adapter_memory}")
    chosen = options.adapter or options.adapter_root or options.merge_adapter
    return AdapterChoice(
        named=parse_named(options.adapter) if chosen else built_in,
        root=options.adapter_root,
        default=options.default_adapter,
        merged=options.merge_adapter,
        memory_bytes=int(options.adapter_memory * 2**30),
    )


def _fail(message: str) -> int:
    print(f"relay serve: {message}", file=sys.stderr)
    return 2
