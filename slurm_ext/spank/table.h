/* Written by `make options` from daemon/settings/options.py, where it is changed. */
#ifndef CKPTLESS_TABLE_H
#define CKPTLESS_TABLE_H

#define CKPTLESS_SPARES_LOW 0
#define CKPTLESS_SPARES_HIGH 1024
#define CKPTLESS_SPARES_RANGE "0 to 1024"
#define CKPTLESS_MIN_NODES_LOW 1
#define CKPTLESS_MIN_NODES_HIGH 65536
#define CKPTLESS_MIN_NODES_RANGE "1 to 65536"
#define CKPTLESS_MAX_NODES_LOW 1
#define CKPTLESS_MAX_NODES_HIGH 65536
#define CKPTLESS_MAX_NODES_RANGE "1 to 65536"
#define CKPTLESS_STEP_LOW 1
#define CKPTLESS_STEP_HIGH 65536
#define CKPTLESS_STEP_RANGE "1 to 65536"
#define CKPTLESS_SCALE_UP_AFTER_LOW 0
#define CKPTLESS_SCALE_UP_AFTER_HIGH 86400
#define CKPTLESS_SCALE_UP_AFTER_RANGE "0s to 86400s"
#define CKPTLESS_MAX_STALL_LOW 5
#define CKPTLESS_MAX_STALL_HIGH 86400
#define CKPTLESS_MAX_STALL_RANGE "5s to 86400s"
#define CKPTLESS_REPLICAS_LOW 1
#define CKPTLESS_REPLICAS_HIGH 64
#define CKPTLESS_REPLICAS_RANGE "1 to 64"
#define CKPTLESS_BANDWIDTH_LOW 1000000
#define CKPTLESS_BANDWIDTH_HIGH 1000000000000
#define CKPTLESS_BANDWIDTH_RANGE "1MB/s to 1000GB/s"

#define CKPTLESS_NONE_LEFT \
	"with %d spare%s, a job of %ld node%s has none left to train on; ask for more nodes (-N) or " \
	"for fewer spares"
#define CKPTLESS_NO_HET \
	"a heterogeneous job (with : or hetjob) cannot train with ckptless, which would use its " \
	"first component alone; submit one job whose nodes are all alike"

#endif
