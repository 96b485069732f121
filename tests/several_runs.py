"""Several runs one after the other in the same processes, to start them once: argv is a file with their overrides."""

import json
import sys

from nanoT5 import main

for overrides in json.loads(open(sys.argv[1]).read()):
    main.run(overrides)
