"""From sharded training weights to the engines: plan (pure), sources, buckets, transports, push;
and who has the device."""
