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
#define CKPTLESS_SCALE_TIMEOUT_LOW 1
#define CKPTLESS_SCALE_TIMEOUT_HIGH 86400
#define CKPTLESS_SCALE_TIMEOUT_RANGE "1s to 86400s"
#define CKPTLESS_GRACEFUL_LOW 1
#define CKPTLESS_GRACEFUL_HIGH 86400
#define CKPTLESS_GRACEFUL_RANGE "1s to 86400s"
#define CKPTLESS_DRAW_IN_LOW 0
#define CKPTLESS_DRAW_IN_HIGH 1024
#define CKPTLESS_DRAW_IN_RANGE "0 to 1024"
#define CKPTLESS_DRAW_IN_PATIENCE_LOW 0
#define CKPTLESS_DRAW_IN_PATIENCE_HIGH 86400
#define CKPTLESS_DRAW_IN_PATIENCE_RANGE "0s to 86400s"
#define CKPTLESS_MAX_STALL_LOW 5
#define CKPTLESS_MAX_STALL_HIGH 86400
#define CKPTLESS_MAX_STALL_RANGE "5s to 86400s"
#define CKPTLESS_REPLICAS_LOW 1
#define CKPTLESS_REPLICAS_HIGH 64
#define CKPTLESS_REPLICAS_RANGE "1 to 64"
#define CKPTLESS_BANDWIDTH_LOW 1000000
#define CKPTLESS_BANDWIDTH_HIGH 1000000000000
#define CKPTLESS_BANDWIDTH_RANGE "1MB/s to 1000GB/s"

#define CKPTLESS_MOST_SIZES 4096
#define CKPTLESS_SIZES_WANTED \
	"up to 16 numbers from 1 to 65536 that ascend, such as 4:8:12"

#define CKPTLESS_NONE_LEFT \
	"with %ld spare%s, a job of %ld node%s has none left to train on; ask for more nodes (-N) " \
	"or for fewer spares"
#define CKPTLESS_NO_HET \
	"a heterogeneous job (with : or hetjob) cannot train with ckptless, which would use its " \
	"first component alone; submit one job whose nodes are all alike"
#define CKPTLESS_BOTH_WAYS \
	"sizes says the same as min-nodes, max-nodes and step together (--nnodes MIN:MAX is " \
	"min-nodes); say it in one of these ways"
#define CKPTLESS_UPSIDE_DOWN \
	"min-nodes=%ld is more than max-nodes=%ld; make the one smaller, or the other larger"
#define CKPTLESS_NOT_A_SIZE \
	"the job trains on %ld node%s, spares apart, which is none of sizes=%s; add it to them, or " \
	"ask for another number of nodes"
#define CKPTLESS_OUTSIDE \
	"%s=%ld is %s than the %ld node%s that the job trains on, spares apart; change it, or the " \
	"number of nodes"
#define CKPTLESS_NOT_WHOLE \
	"from the %ld node%s that the job trains on, steps of %ld do not lead to %s=%ld: its sizes " \
	"would not divide into replicas; change one of the three"
#define CKPTLESS_NO_ROOM \
	"the job is to grow to %ld nodes, and has %ld to train on, %ld spare%s, and %ld to draw in; " \
	"ask for them as spares, allow it to draw nodes in (draw-in=N), or let it grow to fewer"
#define CKPTLESS_TOO_MANY \
	"from min-nodes=%ld to max-nodes=%ld are more than %ld sizes; choose a larger step"
#define CKPTLESS_NOT_HERE \
	"this site has no elastic jobs; leave out min-nodes, max-nodes, step and sizes, and give " \
	"--nnodes one number"
#define CKPTLESS_NOT_IN \
	"partition %s has no elastic jobs, as have %s; choose among these, or leave out min-nodes, " \
	"max-nodes, step and sizes"
#define CKPTLESS_NO_DRAW_IN_STEP \
	"draw-in is for a batch script: a task of srun has nobody who could ask Slurm for nodes; " \
	"start ckptless-run without srun, or say draw-in=0"
#define CKPTLESS_NO_DRAW_IN_ARRAY \
	"Slurm adds no node to a task of a job array; leave out draw-in, or submit the task as a " \
	"job of its own"

#endif
