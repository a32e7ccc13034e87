#!/bin/sh
# Runs after the package is installed or upgraded, under dpkg and rpm. The agent is not enabled: it changes settings of the
# machine, and needs a policy. One that runs is restarted. Settings stay meanwhile.
set -e

if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	systemctl try-restart slipstream-agent.service
fi
