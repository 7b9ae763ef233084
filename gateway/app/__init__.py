"""The composition root: the only room that sees every other one."""

from gateway.app.gateway import Gateway
from gateway.app.process import run, tune_collector

__all__ = ["Gateway", "run", "tune_collector"]
