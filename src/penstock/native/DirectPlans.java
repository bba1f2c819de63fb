package penstock;

import java.io.BufferedOutputStream;
import java.io.FileOutputStream;
import java.io.OutputStream;
import java.util.Iterator;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.spark.Dependency;
import org.apache.spark.Partition;
import org.apache.spark.SparkConf;
import org.apache.spark.TaskContext$;
import org.apache.spark.TaskContextImpl;
import org.apache.spark.executor.TaskMetrics;
import org.apache.spark.memory.MemoryManager;
import org.apache.spark.memory.TaskMemoryManager;
import org.apache.spark.memory.UnifiedMemoryManager;
import org.apache.spark.rdd.RDD;
import org.apache.spark.serializer.JavaSerializer;
import org.apache.spark.serializer.SerializerInstance;
import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.execution.arrow.ArrowBatchStreamWriter;
import org.apache.spark.sql.internal.SQLConf;
import scala.reflect.ClassTag;
import scala.reflect.ClassTag$;

/**
 * Evaluates plans of one partition in the calling thread, as a task of Spark would, without a job.
 *
 * <p>Compiled when it is first needed, by the compiler that Spark has for the code it generates; it
 * knows no generics and no lambdas. See direct.py.
 */
public class DirectPlans {
    /** Into how many pages memory is divided at least. A few rows take a whole one, too. */
    private static final int PAGES_MIN = 1024;

    /** As Spark calls whoever asks for blocks (of broadcasts) and is no task of its own. */
    private static final long NO_TASK = -1024;

    /** Numbers for those that memory is given to, apart from the tasks of Spark. */
    private final AtomicLong numbers = new AtomicLong(1L << 48);

    /** What is under way, by job group: the context of a task, and the thread that runs it. */
    private final ConcurrentHashMap running = new ConcurrentHashMap();

    private final MemoryManager memory;
    private final JavaSerializer serializer;

    public DirectPlans(SparkConf conf) {
        this.serializer = new JavaSerializer(conf);
        this.memory = UnifiedMemoryManager.apply(conf, PAGES_MIN / 16);
    }

    public Plan plan(Dataset frame) {
        return new Plan(this, frame);
    }

    /** End what is under way in a job group, as Spark ends a task. */
    public void cancel(String group) {
        Object[] found = (Object[]) running.get(group);
        if (found != null) {
            ((TaskContextImpl) found[0]).markInterrupted("cancelled");
            ((Thread) found[1]).interrupt();
        }
    }

    /** The memory in use, in bytes. */
    public long memoryUsed() {
        return memory.executionMemoryUsed();
    }

    /** The plan of one frame. */
    public static class Plan {
        private final DirectPlans plans;
        private final Dataset frame;
        private final RDD batches;
        private final Partition partition;
        private final Properties settings = new Properties();

        Plan(DirectPlans plans, Dataset frame) {
            this.plans = plans;
            this.frame = frame;
            RDD shared = frame.toArrowBatchRdd();
            if (shared.getNumPartitions() != 1) {
                throw new IllegalArgumentException("the plan has several partitions");
            }
            // A copy, as a task gets one: operators have state, with which a job cannot be sent.
            resolve(shared);
            SerializerInstance copying = plans.serializer.newInstance();
            ClassTag any = ClassTag$.MODULE$.AnyRef();
            Object[] task = new Object[] {shared, shared.partitions()[0]};
            Object[] copy = (Object[]) copying.deserialize(
                copying.serialize(task, any), Thread.currentThread().getContextClassLoader(), any);
            this.batches = (RDD) copy[0];
            this.partition = (Partition) copy[1];
            // A task knows the session's settings by its properties.
            Iterator all = frame.sparkSession().conf().getAllAsJava().entrySet().iterator();
            while (all.hasNext()) {
                Map.Entry each = (Map.Entry) all.next();
                settings.setProperty((String) each.getKey(), (String) each.getValue());
            }
        }

        /** Let what is read know where it reads from, as the scheduler does before it sends it. */
        private static void resolve(RDD reader) {
            scala.collection.Iterator all = reader.dependencies().iterator();
            while (all.hasNext()) {
                resolve(((Dependency) all.next()).rdd());
            }
        }

        /**
         * Evaluate it on what its files hold now, and write its rows to a file, as an Arrow stream.
         * The gateway to Python would take 40 ms for more than a few kilobytes.
         */
        public void collect(String file) throws Exception {
            String group =
                frame.sparkSession().sparkContext().getLocalProperty("spark.jobGroup.id");
            TaskMemoryManager pages =
                new TaskMemoryManager(plans.memory, plans.numbers.incrementAndGet());
            TaskContextImpl task = new TaskContextImpl(
                0, 0, 0, NO_TASK, 0, 1, pages, settings, null, TaskMetrics.empty(),
                scala.math.BigDecimal.int2bigDecimal(1),
                scala.collection.immutable.Map$.MODULE$.empty());
            OutputStream stream = new BufferedOutputStream(new FileOutputStream(file), 1 << 16);
            TaskContext$.MODULE$.setTaskContext(task);
            if (group != null) {
                plans.running.put(group, new Object[] {task, Thread.currentThread()});
            }
            try {
                SQLConf conf = frame.sparkSession().sessionState().conf();
                ArrowBatchStreamWriter writer = new ArrowBatchStreamWriter(
                    frame.schema(), stream, conf.sessionLocalTimeZone(), true,
                    conf.arrowUseLargeVarTypes());
                writer.writeBatches(batches.iterator(partition, task));
                writer.end();
            } finally {
                if (group != null) {
                    plans.running.remove(group);
                }
                Thread.interrupted(); // one that came late is not meant for what comes next
                try {
                    task.markTaskCompleted(scala.Option.empty());
                } finally {
                    pages.cleanUpAllAllocatedMemory();
                    TaskContext$.MODULE$.unset();
                    stream.close(); // last: a full disk leaves nothing of a task in this thread
                }
            }
        }
    }
}
