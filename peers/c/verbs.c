// What plain libibverbs takes for the operations that the benchmark of the library measures: one thread, no abstraction.
//
//   verbs server ADDR:PORT SPEC...   serves one client
//   verbs client ADDR:PORT SPEC...   measures, and prints a line of JSON for each SPEC
//   verbs local  ADDR:PORT SPEC...   both ends are queue pairs of this process (not for send_lat); the address is not used
//
//   SPEC = op:size:in_flight:count   op = send_lat | write_lat | read_lat | write_bw
//
//   RDMA_DEV        the device (default: the first one)
//   RDMA_GID_INDEX  the index of its address (1)
//   RDMA_MTU        the path MTU (1024)
//   MODE            event    (default) poll; when there is nothing arm the channel, poll once more, sleep in epoll
//                   channel  sleep in epoll before every poll, with the channel armed
//                   poll     never sleep
//
// cc -O2 -o verbs verbs.c -libverbs
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH = 128, CQ_DEPTH = 1024, INLINE = 64, BATCH = 32, ACKNOWLEDGE_BATCH = 64, MAX_SPECS = 64 };

// The id of a receive; those of sends and writes are smaller.
static const uint64_t RECEIVE = 1u << 31;

struct spec {
    char op[16];
    size_t size;
    int in_flight, count;
};

// What a queue pair's peer must know.
struct endpoint {
    uint64_t address;
    uint32_t number, rkey;
    union ibv_gid gid;
};

struct pair {
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    char *memory;
    struct endpoint peer;
};

static enum { EVENT, CHANNEL, POLL } mode;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static int epoll;

static void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static const char *variable(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static double cpu_microseconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e6 + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
}

// ---- completions

static void arm(void) {
    if ((errno = ibv_req_notify_cq(cq, 0)))
        die("arm");
}

static void sleep_on_channel(void) {
    static unsigned unacknowledged;
    struct epoll_event event;
    while (epoll_wait(epoll, &event, 1, -1) < 0)
        if (errno != EINTR)
            die("epoll");
    struct ibv_cq *which;
    void *data;
    while (!ibv_get_cq_event(channel, &which, &data))
        if (++unacknowledged == ACKNOWLEDGE_BATCH) {
            ibv_ack_cq_events(cq, unacknowledged);
            unacknowledged = 0;
        }
}

// The next completion's id, waiting for it as the mode says.
static uint64_t next_completion(void) {
    static struct ibv_wc batch[BATCH];
    static int taken, used;
    while (used == taken) {
        if (mode == CHANNEL) {
            sleep_on_channel();
            arm();
        }
        used = 0;
        taken = ibv_poll_cq(cq, BATCH, batch);
        if (taken == 0 && mode == EVENT) {
            arm();
            taken = ibv_poll_cq(cq, BATCH, batch);
            if (taken == 0)
                sleep_on_channel();
        }
        if (taken < 0)
            die("poll");
    }
    struct ibv_wc *wc = &batch[used++];
    if (wc->status) {
        fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc->status));
        exit(1);
    }
    return wc->wr_id;
}

// ---- work requests

static void post(struct pair *pair, enum ibv_wr_opcode op, char *local, uint64_t remote, size_t size, uint64_t id) {
    struct ibv_sge sge = { (uintptr_t)local, size, pair->mr->lkey };
    struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED };
    if (size <= INLINE && op != IBV_WR_RDMA_READ)
        wr.send_flags |= IBV_SEND_INLINE;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = pair->peer.rkey;
    struct ibv_send_wr *bad;
    if ((errno = ibv_post_send(pair->qp, &wr, &bad)))
        die("post");
}

static void post_receive(struct pair *pair, char *local, size_t size) {
    struct ibv_sge sge = { (uintptr_t)local, size, pair->mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = RECEIVE, .sg_list = &sge, .num_sge = 1 };
    struct ibv_recv_wr *bad;
    if ((errno = ibv_post_recv(pair->qp, &wr, &bad)))
        die("post a receive");
}

// ---- queue pairs

static void open_device(void) {
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    if (!devices)
        die("list the devices");
    const char *wanted = getenv("RDMA_DEV");
    for (int i = 0; i < count && !context; i++)
        if (!wanted || !strcmp(ibv_get_device_name(devices[i]), wanted))
            context = ibv_open_device(devices[i]);
    if (!context)
        die("open the device");
    ibv_free_device_list(devices);
    pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    cq = channel ? ibv_create_cq(context, CQ_DEPTH, NULL, channel, 0) : NULL;
    epoll = epoll_create1(0);
    struct epoll_event readable = { .events = EPOLLIN };
    if (!pd || !cq || epoll < 0 || fcntl(channel->fd, F_SETFL, O_NONBLOCK) ||
        epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &readable))
        die("prepare the device");
    if (mode == CHANNEL)
        arm();
}

static struct endpoint create(struct pair *pair, size_t bytes) {
    const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if (posix_memalign((void **)&pair->memory, 4096, bytes))
        die("allocate");
    memset(pair->memory, 1, bytes);
    pair->mr = ibv_reg_mr(pd, pair->memory, bytes, all);
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = INLINE } };
    pair->qp = ibv_create_qp(pd, &init);
    if (!pair->mr || !pair->qp)
        die("create a queue pair");
    struct endpoint endpoint = { (uintptr_t)pair->memory, pair->qp->qp_num, pair->mr->rkey, { { 0 } } };
    if (ibv_query_gid(context, 1, atoi(variable("RDMA_GID_INDEX", "1")), &endpoint.gid))
        die("find the address");
    return endpoint;
}

static void join(struct pair *pair, const struct endpoint *peer) {
    pair->peer = *peer;
    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
    const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    if ((errno = ibv_modify_qp(pair->qp, &init, mask)))
        die("move to INIT");
    enum ibv_mtu mtu = IBV_MTU_256;
    for (int bytes = atoi(variable("RDMA_MTU", "1024")); bytes > 256 && mtu < IBV_MTU_4096; bytes /= 2)
        mtu++;
    struct ibv_qp_attr receive = { .qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = peer->number,
        .max_dest_rd_atomic = 16, .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer->gid, .hop_limit = 64,
            .sgid_index = atoi(variable("RDMA_GID_INDEX", "1")) } } };
    if ((errno = ibv_modify_qp(pair->qp, &receive, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)))
        die("move to RTR");
    struct ibv_qp_attr send = { .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16 };
    if ((errno = ibv_modify_qp(pair->qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)))
        die("move to RTS");
}

// ---- the socket on which the two processes find each other

static int meet(char *at, int serve) {
    char *colon = strrchr(at, ':');
    if (!colon) {
        fprintf(stderr, "ADDR:PORT, not %s\n", at);
        exit(2);
    }
    *colon = 0;
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(colon + 1)) };
    inet_pton(AF_INET, at, &address.sin_addr);
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (serve) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 1))
            die("listen");
        puts("READY");
        fflush(stdout);
        fd = accept(fd, NULL, NULL);
    } else if (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        die("connect");
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

// What I have for what you have; the peer's going away ends this process.
static void swap(int fd, const void *mine, void *yours, size_t bytes) {
    if (write(fd, mine, bytes) != (ssize_t)bytes)
        exit(0);
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(fd, (char *)yours + done, bytes - done);
        if (got <= 0)
            exit(0);
        done += got;
    }
}

// ---- what is measured

struct run {
    double *latency;
    double wall, cpu;
};

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void report(const struct spec *spec, struct run *run) {
    // Half a round trip each, of those there and back.
    int n = spec->count, slow = 0, parts = strcmp(spec->op, "send_lat") ? 1 : 2;
    double sum = 0, *latency = run->latency;
    for (int i = 0; i < n; i++) {
        sum += latency[i];
        slow += latency[i] * parts > 50000;
    }
    qsort(latency, n, sizeof *latency, compare);
    printf("{\"impl\":\"%s\",\"op\":\"%s\",\"size\":%zu,\"inflight\":%d,\"n\":%d,\"p50\":%.3f,\"p99\":%.3f,\"max\":%.3f,"
           "\"mean\":%.3f,\"over50ms\":%d,\"MBps\":%.3f,\"ops\":%.3f,\"cpu_us_per_op\":%.3f,\"errors\":0}\n",
        variable("BENCH_IMPL", "C"), spec->op, spec->size, spec->in_flight, n, latency[n / 2],
        latency[(int)(n * 0.99)], latency[n - 1], sum / n, slow, spec->size * (double)n / run->wall,
        n / run->wall * 1e6, run->cpu / n);
    fflush(stdout);
}

static int warm_up(const struct spec *spec) { return spec->count / 10 > 50 ? spec->count / 10 : 50; }

// A message there and one back; the latency is half of that.
static void round_trips(struct pair *pair, const struct spec *spec, struct run *run, int serve, size_t half) {
    char *in = pair->memory, *out = pair->memory + half;
    int warm = warm_up(spec), total = warm + spec->count, received = 0;
    double started = 0, cpu = 0;
    for (int i = 0; i < total; i++) {
        if (i == warm) {
            started = microseconds();
            cpu = cpu_microseconds();
        }
        double before = microseconds();
        int sent = 0;
        if (serve) {
            while (!received)
                received = next_completion() == RECEIVE;
            received = 0;
            if (i + 1 < total)
                post_receive(pair, in, spec->size);
        }
        post(pair, IBV_WR_SEND, out, 0, spec->size, 0);
        while (!sent || (!serve && !received)) {
            if (next_completion() == RECEIVE)
                received = 1;
            else
                sent = 1;
        }
        if (!serve) {
            received = 0;
            if (i + 1 < total)
                post_receive(pair, in, spec->size);
            if (i >= warm)
                run->latency[i - warm] = (microseconds() - before) / 2;
        }
    }
    run->wall = microseconds() - started;
    run->cpu = cpu_microseconds() - cpu;
}

// Writes or reads, so many in flight.
static void one_sided(struct pair *pair, const struct spec *spec, struct run *run) {
    enum ibv_wr_opcode op = strcmp(spec->op, "read_lat") ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
    int warm = warm_up(spec), total = warm + spec->count, posted = 0;
    double posted_at[DEPTH], started = 0, cpu = 0;
    for (int done = 0; done < total; done++) {
        while (posted < total && posted < spec->in_flight) {
            posted_at[posted] = microseconds();
            post(pair, op, pair->memory + posted * spec->size, pair->peer.address + posted * spec->size, spec->size, posted);
            posted++;
        }
        uint64_t id = next_completion();
        double now = microseconds();
        if (done >= warm)
            run->latency[done - warm] = now - posted_at[id];
        if (done + 1 == warm) {
            started = now;
            cpu = cpu_microseconds();
        }
        if (posted < total) {
            posted_at[id] = microseconds();
            post(pair, op, pair->memory + id * spec->size, pair->peer.address + id * spec->size, spec->size, id);
            posted++;
        }
    }
    run->wall = microseconds() - started;
    run->cpu = cpu_microseconds() - cpu;
}

int main(int argc, char **argv) {
    if (argc < 4 || argc - 3 > MAX_SPECS) {
        fprintf(stderr, "usage: %s server|client|local ADDR:PORT op:size:in_flight:count...\n", argv[0]);
        return 2;
    }
    int serve = !strcmp(argv[1], "server"), local = !strcmp(argv[1], "local"), count = argc - 3;
    struct spec specs[MAX_SPECS];
    size_t half = 4096;
    for (int i = 0; i < count; i++) {
        struct spec *spec = &specs[i];
        if (sscanf(argv[3 + i], "%15[^:]:%zu:%d:%d", spec->op, &spec->size, &spec->in_flight, &spec->count) != 4 ||
            (local && !strcmp(spec->op, "send_lat")) || spec->size < 1 || spec->in_flight < 1 || spec->in_flight > DEPTH || spec->count < 1) {
            fprintf(stderr, "op:size:in_flight:count, not %s\n", argv[3 + i]);
            return 2;
        }
        if (spec->size * spec->in_flight > half)
            half = spec->size * spec->in_flight;
    }
    const char *named = variable("MODE", "event");
    mode = !strcmp(named, "poll") ? POLL : !strcmp(named, "channel") ? CHANNEL : EVENT;
    open_device();

    struct pair near, far;
    struct endpoint mine = create(&near, 2 * half), yours;
    int peer = -1;
    if (local) {
        yours = create(&far, 2 * half);
        join(&far, &mine);
    } else {
        peer = meet(argv[2], serve);
        swap(peer, &mine, &yours, sizeof mine);
    }
    join(&near, &yours);

    for (int i = 0; i < count; i++) {
        struct spec *spec = &specs[i];
        struct run run = { .latency = calloc(spec->count, sizeof *run.latency) };
        int send = !strcmp(spec->op, "send_lat");
        char token = 0;
        if (send)
            post_receive(&near, near.memory, spec->size);
        if (!local)
            swap(peer, &token, &token, 1);
        if (send)
            round_trips(&near, spec, &run, serve, half);
        else if (!serve)
            one_sided(&near, spec, &run);
        if (!serve)
            report(spec, &run);
        if (!local)
            swap(peer, &token, &token, 1);
        free(run.latency);
    }
    return 0;
}
