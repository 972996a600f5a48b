# SPDX-License-Identifier: Apache-2.0
from devproxy.api import Client as Client
from devproxy.api import ImageFacts as ImageFacts
from devproxy.api import Job as Job
from devproxy.api import Outcome as Outcome
from devproxy.api import Phase as Phase
from devproxy.api import Progress as Progress
from devproxy.api import StoredImage as StoredImage
from devproxy.errors import DevproxyError as DevproxyError

__version__: str
