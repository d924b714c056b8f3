"""A module whose import makes a fork unsafe, as some libraries' do."""

import threading
import time

threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
