"""A client of etcd: a store of keys that a majority of its servers has to agree on.

It speaks JSON over HTTP, which every etcd from 3.4 on answers, so nothing has to be installed here.
``address.py`` reads where the servers are, ``http.py`` carries one question, ``client.py`` has the
few calls that an election needs. Answers are input like any other: they have a size limit, a
deadline and known types.
"""

from .address import StoreAddress, parse_store
from .client import Condition, Etcd, KeptKey, Put

__all__ = ["Condition", "Etcd", "KeptKey", "Put", "StoreAddress", "parse_store"]
