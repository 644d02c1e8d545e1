"""A job's last values, for those who ask after it has ended: pushed once to a Pushgateway."""

from __future__ import annotations
