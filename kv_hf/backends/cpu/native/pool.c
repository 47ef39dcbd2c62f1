/* Threads for the kernels: torch's own, or a small pool.
 *
 * torch's OpenMP threads spin for a while between two parallel regions, so that a second set of threads would
 * have to compete with them for the cores. Where torch's OpenMP is at hand, kv_hf_use_openmp() hands over its
 * GOMP_parallel and the same threads serve both. Elsewhere threads of our own sleep between calls; one call at a
 * time, a second caller waits. */
#include "kv_hf.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#define MAX_WORKERS 256

typedef void (*Region)(void (*)(void *), void *, unsigned, unsigned);
static Region openmp_region;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;
static int started, active, wanted, open_job;
static uint64_t generation;

typedef struct {
    Task task;
    void *context;
    int64_t tasks;
    atomic_long next;
} Job;
static Job job;

static void run(void *data) {
    Job *mine = data;
    for (;;) {
        int64_t index = atomic_fetch_add(&mine->next, 1);
        if (index >= mine->tasks) return;
        mine->task(mine->context, index);
    }
}

static void *worker(void *unused) {
    (void)unused;
    uint64_t seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!open_job || seen == generation || !wanted) pthread_cond_wait(&work, &lock);
        seen = generation;
        wanted--;
        active++;
        pthread_mutex_unlock(&lock);
        run(&job);
        pthread_mutex_lock(&lock);
        if (--active == 0) pthread_cond_broadcast(&idle); /* the caller, or others that wait for their turn */
    }
    return NULL;
}

/* No thread survives a fork, OpenMP's neither, and the locks may have been held by one of them. */
static void after_fork(void) {
    openmp_region = NULL;
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work, NULL);
    pthread_cond_init(&idle, NULL);
    started = active = wanted = open_job = 0;
}

__attribute__((constructor)) static void register_fork(void) { pthread_atfork(NULL, NULL, after_fork); }

static void start_workers(int count) {
    while (started < count && started < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL)) return; /* fewer threads, the same result */
        pthread_detach(thread);
        started++;
    }
}

typedef struct {
    float *held[NUM_PURPOSES];
    int64_t floats[NUM_PURPOSES];
} Memory;

static pthread_key_t memory_key;

static void free_memory(void *memory) {
    for (int i = 0; i < NUM_PURPOSES; i++) free(((Memory *)memory)->held[i]);
    free(memory);
}

__attribute__((constructor)) static void make_key(void) { pthread_key_create(&memory_key, free_memory); }

float *kv_hf_scratch(int purpose, int64_t floats) {
    Memory *memory = pthread_getspecific(memory_key);
    if (!memory) {
        memory = calloc(1, sizeof(Memory));
        if (!memory || pthread_setspecific(memory_key, memory)) {
            free(memory);
            return NULL;
        }
    }
    if (floats > memory->floats[purpose]) {
        free(memory->held[purpose]);
        memory->floats[purpose] = 0;
        if (posix_memalign((void **)&memory->held[purpose], 64, floats * sizeof(float))) {
            memory->held[purpose] = NULL;
            return NULL;
        }
        memory->floats[purpose] = floats;
    }
    return memory->held[purpose];
}

void kv_hf_use_openmp(void *gomp_parallel) {
#ifdef KV_HF_OWN_THREADS /* for a sanitizer of threads, which does not see how OpenMP's threads wait for each other */
    gomp_parallel = NULL;
#endif
    openmp_region = (Region)gomp_parallel;
}

void kv_hf_parallel(Task task, void *context, int64_t tasks, int64_t threads) {
    if (threads <= 1 || tasks <= 1) {
        for (int64_t i = 0; i < tasks; i++) task(context, i);
        return;
    }
    if (openmp_region) { /* always as many threads as torch takes: another number would end some of them */
        Job local = {.task = task, .context = context, .tasks = tasks};
        openmp_region(run, &local, (unsigned)threads, 0);
        return;
    }
    if (threads > tasks) threads = tasks;
    pthread_mutex_lock(&lock);
    while (open_job) pthread_cond_wait(&idle, &lock);
    start_workers((int)threads - 1);
    job.task = task;
    job.context = context;
    job.tasks = tasks;
    atomic_store(&job.next, 0);
    wanted = (int)threads - 1;
    generation++;
    open_job = 1;
    pthread_cond_broadcast(&work);
    pthread_mutex_unlock(&lock);
    run(&job);
    pthread_mutex_lock(&lock);
    wanted = 0; /* a worker that wakes only now finds nothing to do */
    while (active) pthread_cond_wait(&idle, &lock);
    open_job = 0;
    pthread_cond_broadcast(&idle);
    pthread_mutex_unlock(&lock);
}
