#!/bin/sh
# Runs an agent on another host. It reaches the endpoint of its episode through this very ssh connection:
#
#     options = { argv = ["examples/agents/over_ssh.sh", "HOST", "python3 agent.py"] }
#
# The key and the row go over standard input, not on a command line. The port there is one of HOST's loopback.
set -eu
host=$1
agent=$2
rest=${OPENAI_BASE_URL#http://}
here=${rest%%/*}
there=127.0.0.1:$((10000 + $$ % 50000))
url=http://$there/${rest#*/}
{
    printf '%s\n' "$OPENAI_API_KEY"
    cat
} | ssh -o BatchMode=yes -o ExitOnForwardFailure=yes -R "$there:$here" "$host" \
    "IFS= read -r OPENAI_API_KEY && export OPENAI_API_KEY OPENAI_BASE_URL=$url OPENAI_MODEL=$OPENAI_MODEL && exec $agent"
